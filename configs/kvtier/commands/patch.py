"""``kvtier patch``: the patch tool, with the options of ``python -m kvpatches``."""

from __future__ import annotations

import typer

_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    app.command("patch", context_settings=_WORDS)(patch)


def patch(context: typer.Context) -> None:
    """Upstream fixes carried until they are released: status, apply, revert, show (see: kvtier patch --help)."""
    from kvpatches.__main__ import main

    raise typer.Exit(main(context.args))
