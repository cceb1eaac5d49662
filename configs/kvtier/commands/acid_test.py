"""``kvtier acid-test``: does the tier of a running engine really serve?"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.table import Table

from kvtier.acid.client import Target
from kvtier.acid.result import Result, pool_kept
from kvtier.acid.run import Options, run
from kvtier.commands.common import EXIT_FAILED, JsonOption, console, errors, print_json, user_errors
from kvtier.plan import wishes
from kvtier.units import count


def register(app: typer.Typer) -> None:
    app.command("acid-test")(acid_test)


@user_errors
def acid_test(
    url: Annotated[str, typer.Option(help="The engine's root, such as http://127.0.0.1:8000.")],
    tokens: Annotated[str | None, typer.Option(help="Length of the document; a quarter of the pool otherwise.")] = None,
    pressure_tokens: Annotated[
        str | None, typer.Option(help="Other tokens that evict it; 1.3 times the pool otherwise.")
    ] = None,
    restart_command: Annotated[str | None, typer.Option(help="Shell command that restarts the engine.")] = None,
    parallel: Annotated[str, typer.Option(help="Long contexts at once in the last part; 0 leaves it out.")] = "3",
    parallel_tokens: Annotated[str | None, typer.Option(help="Length of each; the document's otherwise.")] = None,
    model: Annotated[str | None, typer.Option(help="The served model's name, where the engine serves several.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Or VLLM_API_KEY.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Cold, repeat, after eviction pressure, after a restart: what served the document? Exit code 1 where no tier
    did."""
    options = Options(
        tokens=wishes.number("--tokens", tokens),
        pressure_tokens=wishes.number("--pressure-tokens", pressure_tokens),
        restart_command=restart_command,
        parallel=wishes.number_or_none("--parallel", parallel),
        parallel_tokens=wishes.number("--parallel-tokens", parallel_tokens),
    )
    target = Target(url, model, api_key or os.environ.get("VLLM_API_KEY"))
    try:
        result = run(target, options, say=lambda text: errors.print(text, style="dim", markup=False, highlight=False))
    except RuntimeError as error:
        errors.print(f"the engine refused: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    if as_json:
        print_json(result)
    else:
        show(result)
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)


def show(result: Result) -> None:
    """The table and the verdict."""
    pool = f", pool {count(result.pool_tokens)} tokens" if result.pool_tokens else ""
    table = Table(title=f"{result.engine} at {result.url}{pool}")
    table.add_column("step", no_wrap=True)
    for column in (
        "first token s",
        "tokens",
        "computed",
        "from pool",
        "from tier",
        "stored MB",
        "loaded MB",
        "disk MB out",
        "disk MB in",
    ):
        table.add_column(column, justify="right")
    for step in result.steps:
        moved = (step.stored_bytes, step.loaded_bytes, step.disk_written_bytes, step.disk_read_bytes)
        table.add_row(
            step.name,
            f"{step.seconds:.2f}",
            *(count(tokens) for tokens in (step.prompt_tokens, step.computed, step.from_pool, step.from_tier)),
            *(f"{size / 1e6:,.1f}" for size in moved),
        )
    console.print(table)
    if result.parallel:
        part = result.parallel
        times = ", ".join(f"{seconds:.1f}" for seconds in sorted(part.seconds))
        waited = "not said" if part.queue_s_mean is None else f"{part.queue_s_mean:.2f} s"
        console.print(
            f"{part.requests} x {count(part.tokens_each)} tokens at once: {part.completed} completed ({times} s), "
            f"{part.failed} failed, "
            f"{part.preemptions} preemptions, mean queue time {waited}, {count(part.prefill_tokens_per_s)} tokens/s",
            highlight=False,
        )
    colour = "green" if result.passed else "red"
    console.print(f"[bold {colour}]{result.verdict.value}[/]: {result.why}", highlight=False)
    for cause in result.likely_causes:
        console.print(f"  {'note' if result.passed else 'likely cause'}: {cause}", markup=False, highlight=False)
    if pool_kept(result.steps) and result.passed:
        console.print("  note: the pool still held the document after the pressure", highlight=False)
