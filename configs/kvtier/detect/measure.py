"""Measured rates, for what sysfs cannot be trusted with: the link by a pinned copy, the disk by O_DIRECT."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path

import msgspec

from kvtier.facts import Disk, Facts, Measured
from kvtier.units import MIB

_BLOCK = 8 * MIB
_DISK_BYTES = 512 * MIB
"""Long enough to leave a drive's request queue behind, short enough to be a second on a slow drive."""
_COPY_BYTES = 256 * MIB
_COPY_ROUNDS = 5


def measure(facts: Facts, directory: str | None = None) -> Facts:
    """The facts with what could be measured here: nothing of the device where torch sees none, nothing of a disk
    that refuses."""
    up, down = copy_rates()
    where = directory or _fastest(facts.disks)
    write, read = disk_rates(Path(where)) if where else (None, None)
    measured = Measured(
        host_to_device=up,
        device_to_host=down,
        disk_write=write,
        disk_read=read,
        disk_path=where if write else None,
        prefill_tokens_per_s=facts.measured.prefill_tokens_per_s,
    )
    return msgspec.structs.replace(facts, measured=measured)


def copy_rates() -> tuple[float | None, float | None]:
    """Pinned copy to the device and back, bytes a second, best of some rounds; (None, None) without torch or device."""
    try:
        import torch
    except ImportError:
        return None, None
    kind = (
        "cuda" if torch.cuda.is_available() else "xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else None
    )
    if kind is None:
        return None, None
    accelerator = torch.cuda if kind == "cuda" else torch.xpu
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=kind)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def best(target: object, source: object) -> float:
        seconds = []
        for _ in range(_COPY_ROUNDS):
            accelerator.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]
            accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
        return _COPY_BYTES / min(seconds)

    return best(there, here), best(here, there)


def disk_rates(directory: Path, size: int = _DISK_BYTES) -> tuple[float | None, float | None]:
    """O_DIRECT write and read in 8 MiB blocks, bytes a second; (None, None) where the file system refuses or is
    full."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".kvtier-measure-", dir=directory)
    except OSError:
        return None, None
    os.close(descriptor)
    try:
        return _write_then_read(name, size)
    except OSError:
        return None, None
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _write_then_read(name: str, size: int) -> tuple[float, float]:
    direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _BLOCK) as buffer:
            buffer.write(os.urandom(_BLOCK))  # a drive that compresses must not win
            began = time.perf_counter()
            for offset in range(0, size, _BLOCK):
                os.pwritev(direct, [buffer], offset)
            os.fdatasync(direct)
            written = time.perf_counter()
            for offset in range(0, size, _BLOCK):
                os.preadv(direct, [buffer], offset)
            return size / (written - began), size / (time.perf_counter() - written)
    finally:
        os.close(direct)


def _fastest(disks: tuple[Disk, ...]) -> str | None:
    fit = [disk for disk in disks if disk.o_direct and not disk.rotational and disk.free_bytes > 4 * _DISK_BYTES]
    return max(fit, key=lambda disk: disk.free_bytes).mount if fit else None
