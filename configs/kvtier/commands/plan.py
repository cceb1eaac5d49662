"""``kvtier plan``: which tier, and why."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer
from rich.table import Table

from kvtier.commands.common import EXIT_FAILED, JsonOption, console, print_json, user_errors
from kvtier.commands.planning import with_planning_options
from kvtier.facts import Facts
from kvtier.plan.decide import plan as decide
from kvtier.plan.result import Effect, Plan
from kvtier.plan.wishes import Wishes
from kvtier.units import count, gib, rate

_COLOURS = {
    Effect.REFUSED: "red",
    Effect.WARNED: "yellow",
    Effect.CHOSE: "green",
    Effect.CHANGED: "cyan",
    Effect.NOTED: "dim",
}


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


@user_errors
@with_planning_options
def plan(
    model: Annotated[str, typer.Argument(help="A directory with a config.json, or a model in the hub cache.")],
    facts: Facts,
    wishes: Wishes,
    explain: Annotated[bool, typer.Option("--explain", help="Print every rule that applied.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Decide which tier stands behind the KV pool of MODEL on this box, and say why. Exit code 1 where it is
    refused."""
    made = decide(facts, model, wishes)
    if as_json:
        print_json(made)
    else:
        show(made, explain=explain)
    if not made.serves:
        raise typer.Exit(EXIT_FAILED)


def show(plan: Plan, *, explain: bool) -> None:
    """The plan for a person: decision, reasons, tiers, estimate, what to run."""
    colour = "red" if not plan.serves else "green"
    console.print(
        f"[bold {colour}]{plan.decision.value}[/] for {plan.model} on {plan.box or 'this box'} "
        f"({plan.memory} memory, vLLM {plan.target_vllm})"
    )
    for reason in plan.reasons:
        if explain or reason.effect in (Effect.REFUSED, Effect.WARNED, Effect.CHOSE):
            name = f"{reason.rule}: " if explain else ""
            console.print(
                f"  {reason.effect.value:8} {name}{reason.sentence}",
                style=_COLOURS[reason.effect],
                markup=False,
                highlight=False,
            )
    if plan.kv_bytes_per_token:
        drafted = (
            f", and {plan.draft_kv_bytes_per_token:,} B of the draft layers" if plan.draft_kv_bytes_per_token else ""
        )
        console.print(f"KV a token: {plan.kv_formula}{drafted}", markup=False, highlight=False)
    _tables(plan)
    for alternative in plan.alternatives:
        console.print(
            f"  or: {alternative.name} ({alternative.how}); loses {alternative.loses}", markup=False, highlight=False
        )
    for patch in plan.patches:
        console.print(
            f"  patch {patch.name} ({patch.state}): {patch.fixes}", style="yellow", markup=False, highlight=False
        )
    for step in plan.steps:
        console.print(
            f"  {'do first' if step.required else 'consider'}: {step.why}:\n      {step.command}",
            markup=False,
            highlight=False,
        )
    if not plan.serves:
        return
    for node in plan.nodes:
        console.print(f"  once {node.name} serves: {node.check}", markup=False, highlight=False)
    for name, env, args in _hosts(plan):
        console.print(f"\n[bold]{name}[/]")
        words = [*(f"{key}={value}" for key, value in env.items()), *plan.command, *args]
        console.print(shlex.join(words), markup=False, highlight=False)


def _hosts(plan: Plan) -> list[tuple[str, dict[str, str], list[str]]]:
    if plan.nodes:
        return [(f"on {node.name} (rank {node.rank})", node.env, node.vllm_args) for node in plan.nodes]
    return [("run", plan.env, plan.vllm_args)]


def _tables(plan: Plan) -> None:
    if not plan.tiers:
        return
    table = Table()
    for column in (
        "tier",
        "size",
        "tokens",
        f"contexts of {count(plan.max_model_len)}",
        "restore of one",
        "prefill of one",
        "pays from",
    ):
        table.add_column(column, justify="left" if column == "tier" else "right")
    guesses: dict[str, Any] = {estimate.tier: estimate for estimate in plan.estimates}
    for tier in plan.tiers:
        guess = guesses.get(tier.name)
        table.add_row(
            tier.name,
            gib(tier.bytes),
            count(tier.tokens),
            f"{tier.full_contexts:.2f}",
            f"{guess.restore_s:.2f} s" if guess else "-",
            f"{guess.prefill_s:.1f} s" if guess and guess.prefill_s else "-",
            f"{count(guess.pays_from_tokens)} tokens" if guess and guess.pays_from_tokens else "-",
        )
    console.print(table)
    for guess in plan.estimates:
        console.print(
            f"  {guess.tier}: {rate(guess.rate_bytes_per_s)} ({guess.rate_source}); pays wherever prefill is slower "
            f"than {count(guess.break_even_prefill_tokens_per_s)} tokens/s",
            style="dim",
            markup=False,
            highlight=False,
        )
