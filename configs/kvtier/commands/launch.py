"""``kvtier launch``: plan, check, start vLLM, follow it."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import msgspec
import typer

from kvtier.commands.common import EXIT_FAILED, JsonOption, errors, print_json, user_errors
from kvtier.commands.planning import with_planning_options
from kvtier.detect import software
from kvtier.doctor.checks import Check, Status
from kvtier.doctor.plan_checks import before_start
from kvtier.facts import Facts
from kvtier.launch import run, sweep
from kvtier.launch.follow import Follower
from kvtier.launch.patching import apply_needed
from kvtier.launch.prepare import Start, prepare
from kvtier.plan.decide import plan as decide
from kvtier.plan.result import Plan
from kvtier.plan.wishes import Wishes
from kvtier.units import count, gib, version_tuple


def register(app: typer.Typer) -> None:
    app.command("launch")(launch)


class Up(msgspec.Struct, frozen=True, kw_only=True):
    """What launch says when the engine is up."""

    event: str = "up"
    decision: str
    pool_tokens: int | None
    max_concurrency: float | None
    tiers: dict[str, int]
    """Bytes of each tier."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What launch would start."""

    event: str = "dry-run"
    decision: str
    command: list[str]
    env: dict[str, str]
    conflicts: list[str]


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Why launch starts nothing: every check that did not pass."""

    event: str = "stopped"
    decision: str
    checks: list[Check]


@user_errors
@with_planning_options
def launch(
    model: Annotated[str, typer.Argument(help="A directory with a config.json, or a model in the hub cache.")],
    facts: Facts,
    wishes: Wishes,
    vllm_args: Annotated[list[str] | None, typer.Argument(help="After `--`: arguments for vLLM; they win.")] = None,
    apply_patches: Annotated[
        bool, typer.Option("--apply-patches", help="Apply the upstream fixes that the plan needs.")
    ] = False,
    rank: Annotated[int, typer.Option(help="Of a plan for several hosts: which one this is.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan for MODEL, check, and start vLLM. Its exit code is vLLM's; 1 where a check fails before the start."""
    # What vLLM will be started with counts, not what a facts file saw.
    facts = msgspec.structs.replace(facts, environment=software.environment())
    if apply_patches and not dry_run:
        facts, done = apply_needed(decide(facts, model, wishes), facts)
        for line in done:
            _say(line, "dim")
    made = decide(facts, model, wishes)
    _stop_on(before_start(facts, made, os.environ, vllm_args or []), made, as_json=as_json)
    start = prepare(made, vllm_args or [], os.environ, rank, write=not dry_run)
    if other := _other_release(wishes.target_vllm):
        start = msgspec.structs.replace(start, conflicts=[other, *start.conflicts])
    for conflict in start.conflicts:
        _say(f"conflict: {conflict}", "yellow")
    if dry_run and as_json:
        print_json(
            DryRun(decision=made.decision.value, command=start.command, env=start.env, conflicts=start.conflicts)
        )
        return
    shown = shlex.join([*(f"{name}={value}" for name, value in start.env.items()), *start.command])
    if dry_run:
        sys.stdout.write(shown + "\n")
        return
    for leak in sweep.sweep():
        _say(f"swept {leak.path} ({gib(leak.bytes)}), which no process held", "dim")
    _say(f"{made.decision.value}: {shown}", "bold")
    raise typer.Exit(_follow(start, made, as_json=as_json))


def _follow(start: Start, plan: Plan, *, as_json: bool) -> int:
    follower = Follower()
    stream = sys.stderr if as_json else sys.stdout

    def on_line(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()
        if follower.feed(line):
            _announce(follower, plan, as_json=as_json)

    code = run.run(start.command, {**os.environ, **start.env}, on_line)
    if code and not follower.up:
        for hint in follower.hints:
            _say(f"likely cause: {hint}", "red")
    return code


def _announce(follower: Follower, plan: Plan, *, as_json: bool) -> None:
    figures = follower.figures
    if as_json:
        up = Up(
            decision=plan.decision.value,
            pool_tokens=figures.pool_tokens,
            max_concurrency=figures.max_concurrency,
            tiers={tier.name: tier.bytes for tier in plan.tiers if tier.name != "pool"},
        )
        sys.stdout.write(msgspec.json.encode(up).decode() + "\n")
        sys.stdout.flush()
        return
    pool = "not said" if figures.pool_tokens is None else f"{count(figures.pool_tokens)} tokens"
    seats = "" if figures.max_concurrency is None else f", maximum concurrency {figures.max_concurrency:.2f}"
    _say(f"up: KV pool {pool}{seats}", "bold green")
    for tier in plan.tiers:
        if tier.name != "pool":
            _say(
                f"    {tier.name}: {gib(tier.bytes)}, some {count(tier.tokens)} tokens, "
                f"{tier.full_contexts:.1f} full contexts",
                "green",
            )


def _other_release(target: str | None) -> str | None:
    """That the plan is for another vLLM than the one that will be started, in words."""
    installed = software.versions().vllm
    if target is None or installed is None or version_tuple(target) == version_tuple(installed):
        return None
    return f"the plan is for vLLM {target} (--target-vllm), the one installed and started here is {installed}"


def _stop_on(checks: list[Check], plan: Plan, *, as_json: bool) -> None:
    for check in checks:
        if check.status is not Status.PASS:
            _say(
                f"{check.status.value}: {check.name}: {check.sentence}" + (f"\n      {check.fix}" if check.fix else ""),
                "red" if check.status is Status.FAIL else "yellow",
            )
    if any(check.status is Status.FAIL for check in checks):
        if as_json:
            bad = [check for check in checks if check.status is not Status.PASS]
            print_json(Stopped(decision=plan.decision.value, checks=bad))
        raise typer.Exit(EXIT_FAILED)


def _say(text: str, style: str) -> None:
    errors.print(text, style=style, markup=False, highlight=False)
