"""``kvtier detect``: what the box is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvtier.commands.common import FactsOption, JsonOption, MemoryOption, console, facts_from, print_json, user_errors
from kvtier.detect import measure
from kvtier.facts import Facts
from kvtier.units import gib, rate
from lmcache_nvme_backend.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("detect")(detect)


@user_errors
def detect(
    memory: MemoryOption = None,
    facts: FactsOption = None,
    measured: Annotated[bool, typer.Option("--measure", help="Measure the link to the device and the disk.")] = False,
    directory: Annotated[
        str | None, typer.Option("--nvme", help="Directory to measure; the largest fit disk otherwise.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What this box is: device, kind of memory and the evidence for it, RAM, /dev/shm, disks, limits, versions."""
    if directory is not None and not measured:
        raise ConfigError("--nvme", repr(directory), "--nvme together with --measure", "Add --measure.")
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError("--nvme", repr(directory), "a directory that exists", "Make it, or name another one.")
    found = facts_from(facts, memory)
    if measured:
        found = measure.measure(found, directory)
    if as_json:
        print_json(found)
        return
    show(found)


def show(facts: Facts) -> None:
    """The facts as tables."""
    table = Table(title=facts.label or "this box", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("memory", f"[bold]{facts.memory.value}[/bold]")
    for entry in facts.evidence:
        table.add_row("  decided by" if entry.decides else "  seen", f"{entry.source}: {entry.finding}")
    for device in facts.devices:
        shown = "memory not shown" if device.memory_bytes is None else gib(device.memory_bytes)
        table.add_row(
            "device",
            f"{device.name}, {shown}"
            + (f", capability {device.compute_capability}" if device.compute_capability else ""),
        )
    table.add_row(
        "RAM",
        f"{gib(facts.ram_total)}, {gib(facts.ram_available)} available, {facts.physical_cores} cores ({facts.arch})",
    )
    table.add_row("/dev/shm", f"{gib(facts.shm_total)}, {gib(facts.shm_free)} free")
    if facts.swap_total:
        table.add_row("swap", f"{gib(facts.swap_total)}, of it zram {gib(facts.zram_total)}")
    table.add_row("open files", f"{facts.open_files_soft} (may be raised to {facts.open_files_hard})")
    installed = facts.versions
    table.add_row(
        "installed", f"vLLM {installed.vllm or '-'}, LMCache {installed.lmcache or '-'}, torch {installed.torch or '-'}"
    )
    for name, state in facts.patches.items():
        table.add_row("patch", f"{name}: {state}")
    for name, value in (
        ("copy to the device", facts.measured.host_to_device),
        ("copy back", facts.measured.device_to_host),
        ("disk write", facts.measured.disk_write),
        ("disk read", facts.measured.disk_read),
    ):
        if value:
            table.add_row(f"measured {name}", rate(value))
    console.print(table)
    disks = Table(title="file systems")
    for column in ("mount", "type", "device", "size", "free", "turns", "O_DIRECT"):
        disks.add_column(column)
    for disk in facts.disks:
        words = {True: "yes", False: "no", None: "?"}
        disks.add_row(
            disk.mount,
            disk.filesystem + (" (image file)" if disk.loopback else ""),
            disk.device,
            gib(disk.total_bytes),
            gib(disk.free_bytes),
            words[disk.rotational],
            words[disk.o_direct],
        )
    console.print(disks)
