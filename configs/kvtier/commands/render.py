"""``kvtier render``: the plan as arguments, files and units."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvtier.commands.common import EXIT_FAILED, JsonOption, errors, print_json, user_errors
from kvtier.commands.planning import with_planning_options
from kvtier.facts import Facts
from kvtier.plan.decide import plan as decide
from kvtier.plan.result import Effect
from kvtier.plan.wishes import Wishes
from kvtier.render import lmcache_server
from kvtier.render.formats import FORMATS
from kvtier.render.formats import render as to_text
from lmcache_nvme_backend.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("render")(render)


@user_errors
@with_planning_options
def render(
    model: Annotated[str, typer.Argument(help="A directory with a config.json, or a model in the hub cache.")],
    facts: Facts,
    wishes: Wishes,
    form: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "args",
    rank: Annotated[int, typer.Option(help="Of a plan for several hosts: which one.")] = 0,
    door: Annotated[str, typer.Option(help="`mp`: through LMCache's server; two commands, as --format args.")] = "",
    behind: Annotated[
        str | None, typer.Option(help="With --door mp: a store that hosts share, redis://HOST:PORT or JSON.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The plan for MODEL as text: vLLM's arguments, LMCache's YAML, the environment, a compose service, a unit, a
    pod. Exit code 1 where the plan is refused."""
    check_door(door, form, behind)
    made = decide(facts, model, wishes)
    if form in FORMATS and not made.serves:
        refused = [reason.sentence for reason in made.reasons if reason.effect is Effect.REFUSED]
        if as_json:
            print_json({"format": form, "rank": rank, "text": None, "refused": refused})
        for sentence in refused:
            errors.print(f"refused: {sentence}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED)
    text = lmcache_server.render(made, behind) if door == "mp" else to_text(made, form, rank)
    if as_json:
        print_json({"format": form, "rank": rank, "text": text})
    else:
        sys.stdout.write(text)


def check_door(door: str, form: str, behind: str | None) -> None:
    """Raises `ConfigError` where the options do not go together."""
    if door not in ("", "mp"):
        raise ConfigError("--door", repr(door), "mp, or nothing for the plan's own", "Leave it out.")
    if door == "mp" and form != "args":
        raise ConfigError("--format", f"{form} with --door mp", "args", "Leave --format out.")
    if behind is not None and door != "mp":
        raise ConfigError("--behind", repr(behind), "nothing without --door mp", "Add --door mp.")
