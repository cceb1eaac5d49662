"""Look at the box and put the facts together."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec

from kvtier.detect import disks, drm, host, nvidia, software
from kvtier.detect.memory import JETSON_FILES, classify
from kvtier.facts import Facts, Memory, Node


def look(
    root: Path = Path("/"), user_says: Memory | None = None, nodes: tuple[Node, ...] = (), smi: nvidia.Smi | None = None
) -> Facts:
    """Facts about this box. `root` is where /proc and /sys are found; tests give a copied tree and nvidia-smi's output.

    Nothing that fails to be read is an error: it is absent from the facts.
    """
    devices = nvidia.devices(root, smi, cuda=root == Path("/")) + drm.devices(root)
    jetson = tuple(name for name in JETSON_FILES if (root / name.lstrip("/")).exists())
    memory, evidence = classify(devices, jetson, user_says)
    ram = host.ram(root)
    shm_total, shm_free = host.shm(root)
    soft, hard = host.open_files()
    return Facts(
        label=devices[0].name if devices else "no accelerator",
        arch=platform.machine(),
        devices=devices,
        jetson_files=jetson,
        memory=memory,
        evidence=evidence,
        user_memory=user_says,
        physical_cores=host.physical_cores(root),
        ram_total=ram.total,
        ram_available=ram.available,
        shm_total=shm_total,
        shm_free=shm_free,
        swap_total=ram.swap,
        zram_total=ram.zram,
        disks=disks.candidates(root),
        open_files_soft=soft,
        open_files_hard=hard,
        container=host.in_container(root),
        wsl=host.in_wsl(root),
        versions=software.versions(),
        environment=software.environment(),
        patches=software.patch_states(),
        nodes=nodes,
    )


def overrule(facts: Facts, user_says: Memory) -> Facts:
    """The same facts, with the memory kind that the user states."""
    memory, evidence = classify(facts.devices, facts.jetson_files, user_says)
    return msgspec.structs.replace(facts, memory=memory, evidence=evidence, user_memory=user_says)
