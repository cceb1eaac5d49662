"""The command `kvtier`. Importing it imports neither torch nor vLLM; each sub-command is a module of commands/."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from kvtier.commands import acid_test, detect, doctor, launch, plan, render, watch
from kvtier.commands.demo import demo

app = typer.Typer(
    help="An NVMe tier behind vLLM's KV pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
for _command in (detect, plan, render, launch, doctor, acid_test, watch):
    _command.register(app)

_INTERRUPTED = 130
# Recent typers carry a click of their own, so that `import click` names other classes than those raised here.
_ClickException = typer.BadParameter.__bases__[0].__bases__[0]


@app.callback()
def _root() -> None:
    """An NVMe tier behind vLLM's KV pool."""


def main() -> None:
    """Run the command line. What a person can put right is one message and exit status 2, without a traceback."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    from kvtier.engine import EngineRequestError, EngineStartError
    from lmcache_nvme_backend.errors import ConfigError

    try:
        code = app(arguments, standalone_mode=False) or 0
    except _ClickException as error:
        error.show()  # type: ignore[attr-defined]
        return int(error.exit_code)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except (ConfigError, EngineStartError, EngineRequestError) as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    if code == _INTERRUPTED:
        print("kvtier: interrupted; everything it had started is stopped.", file=sys.stderr)
    return int(code)


def _end(number: int, frame: FrameType | None) -> None:
    """A polite end, so that what was started is stopped first."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
