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
from kvtier.render.formats import FORMATS
from kvtier.render.formats import render as to_text


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
    as_json: JsonOption = False,
) -> None:
    """The plan for MODEL as text: vLLM's arguments, LMCache's YAML, the environment, a compose service, a unit, a
    pod. Exit code 1 where the plan is refused."""
    made = decide(facts, model, wishes)
    if form in FORMATS and not made.serves:
        refused = [reason.sentence for reason in made.reasons if reason.effect is Effect.REFUSED]
        if as_json:
            print_json({"format": form, "rank": rank, "text": None, "refused": refused})
        for sentence in refused:
            errors.print(f"refused: {sentence}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED)
    text = to_text(made, form, rank)
    if as_json:
        print_json({"format": form, "rank": rank, "text": text})
    else:
        sys.stdout.write(text)
