"""`kvtier demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint's folder, or `random`, or `hybrid`, both tiny. Default: SmolLM2."),
    ] = None,
    prompt: Annotated[Path | None, typer.Option(help="A text file to ask instead of the demo's document.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    nvme: Annotated[Path | None, typer.Option(help="Keep the chunks here. Default: a folder that is removed.")] = None,
    door: Annotated[
        str, typer.Option(help="The way into the tier: `plugin`, `native`, `tier` or `mp` (see the README).")
    ] = "plugin",
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the default folder of chunks.")] = False,
    port: Annotated[
        int, typer.Option(help="The engine's port; another one is taken where it is busy. 0: any.", min=0, max=65535)
    ] = 0,
) -> None:
    """Show a prompt's KV surviving an engine restart with no CPU cache, on this machine, without a GPU.

    Exit status 0 where the result is as it should be, 1 where it is not (the reasons are printed), 2 where something
    kept the demo from running.
    """
    from rich.console import Console

    from kvtier.demo import DemoOptions, run_demo
    from kvtier.doors import known_door
    from kvtier.progress import Progress
    from kvtier.report import show

    console = Console()
    options = DemoOptions(model=model, prompt=prompt, nvme=nvme, keep=keep, port=port, door=known_door(door))
    with Progress(console) as progress:
        report = run_demo(options, progress.say)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_bytes(report.to_json())
    show(report, console)
    if report.faults():
        raise typer.Exit(1)
