"""The command `kvtier`. Importing it imports neither torch nor vLLM; each sub-command is a module of commands/."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from kvtier.commands import acid_test, detect, doctor, launch, patch, plan, render, store, watch
from kvtier.commands.demo import demo

app = typer.Typer(
    help="An NVMe tier behind vLLM's KV pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
for _command in (detect, plan, render, launch, doctor, patch, acid_test, watch, store):
    _command.register(app)

_INTERRUPTED = 130


@app.callback()
def _root() -> None:
    """An NVMe tier behind vLLM's KV pool."""


def main() -> None:
    """Run the command line. What a person can put right is one message and exit status 2, without a traceback."""
    from kvtier.engine import EngineRequestError, EngineStartError
    from lmcache_nvme_backend.errors import ConfigError

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        app()
    except (ConfigError, EngineStartError, EngineRequestError) as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            print("kvtier: interrupted; everything it had started is stopped.", file=sys.stderr)
        raise


def _end(number: int, frame: FrameType | None) -> None:
    """A polite end, so that what was started is stopped first."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
