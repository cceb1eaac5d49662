"""``kvtier doctor``: every check as pass, warn or fail, with the command that mends it."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvtier.commands.common import EXIT_FAILED, JsonOption, console, print_json, user_errors
from kvtier.commands.planning import with_planning_options
from kvtier.doctor import engine_env
from kvtier.doctor.box_checks import box_checks
from kvtier.doctor.checks import Check, Status
from kvtier.doctor.engine_checks import running
from kvtier.doctor.plan_checks import before_start
from kvtier.facts import Facts
from kvtier.observe import snapshot
from kvtier.plan.decide import plan as decide
from kvtier.plan.wishes import Wishes
from lmcache_nvme_backend.errors import ConfigError

_COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


class Diagnosis(msgspec.Struct, frozen=True):
    """The checks, and whether none failed."""

    healthy: bool
    checks: list[Check]


@user_errors
@with_planning_options
def doctor(
    facts: Facts,
    wishes: Wishes,
    model: Annotated[str | None, typer.Argument(help="Also check the plan for this model.")] = None,
    url: Annotated[str | None, typer.Option(help="Also check the engine that runs there.")] = None,
    engine_environment: Annotated[
        bool, typer.Option("--engine-env", help="Check only the environment of vLLM's processes on this host.")
    ] = False,
    expect: Annotated[list[str] | None, typer.Option(help="With --engine-env: NAME=VALUE, once a variable.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the box, the plan for MODEL, and a running engine. Exit code 1 where a check fails."""
    if expect and not engine_environment:
        raise ConfigError("--expect", repr(expect[0]), "--expect together with --engine-env", "Add --engine-env.")
    if engine_environment:
        checks = engine_env.check(engine_env.expected(expect or ["PYTHONHASHSEED=0"]))
    else:
        checks = before_start(facts, decide(facts, model, wishes), os.environ) if model else box_checks(facts)
        if url:
            checks += running(snapshot.scrape(url), facts, url, wishes.typical_tokens)
    healthy = all(check.status is not Status.FAIL for check in checks)
    if as_json:
        print_json(Diagnosis(healthy=healthy, checks=checks))
    else:
        show(checks)
    if not healthy:
        raise typer.Exit(EXIT_FAILED)


def show(checks: list[Check]) -> None:
    """The checks as a table."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for check in checks:
        colour = _COLOURS[check.status]
        fix = f"\n[bold]{escape(check.fix)}[/]" if check.fix and check.status is not Status.PASS else ""
        table.add_row(f"[{colour}]{check.status.value}[/]", check.name, escape(check.sentence) + fix)
    console.print(table)
