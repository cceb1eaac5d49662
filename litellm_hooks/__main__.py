"""`python -m litellm_hooks explain --config proxy.yaml --request request.json`"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from litellm_hooks.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Answers 0, or 2 after one line on stderr for what the user can put right."""
    parser = argparse.ArgumentParser(prog="python -m litellm_hooks", description="Prefix affinity for LiteLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("explain", help="print where a request would go and why")
    command.add_argument("--config", type=Path, required=True, help="the proxy's YAML")
    command.add_argument(
        "--request", type=Path, required=True, action="append", help="a request body; given again: the session's next"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from litellm_hooks.explain import explain

    try:
        print("\n".join(asyncio.run(explain(options.config, options.request))))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
