"""Leaked /dev/shm/vllm_offload_*.mmap: after a SIGTERM vLLM leaves them, and with host IPC they eat the next start's
space."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

_PATTERN = "vllm_offload_*.mmap"
_YOUNG_S = 120.0
"""A file may be made by an engine of another container, whose processes cannot be seen from here; its ranks open it
within 30 s."""


class Leak(msgspec.Struct, frozen=True):
    """A map that no process seen from here holds."""

    path: Path
    bytes: int


def leaks(shm: Path = Path("/dev/shm"), proc: Path = Path("/proc"), young_s: float = _YOUNG_S) -> list[Leak]:
    """Offload maps of this user that nobody holds open or mapped, and that are not young."""
    files = {}
    for path in sorted(shm.glob(_PATTERN)):
        try:
            stat = path.lstat()
        except OSError:
            continue
        if stat.st_uid == os.geteuid() and time.time() - stat.st_ctime >= young_s:
            files[stat.st_dev, stat.st_ino] = Leak(path, stat.st_blocks * 512)
    if not files:
        return []
    held = _held(proc)
    return [leak for key, leak in files.items() if key not in held]


def sweep(shm: Path = Path("/dev/shm"), proc: Path = Path("/proc"), young_s: float = _YOUNG_S) -> list[Leak]:
    """Remove the leaks; those that could not be removed are not in the answer."""
    removed = []
    for leak in leaks(shm, proc, young_s):
        try:
            leak.path.unlink()
        except OSError:
            continue
        removed.append(leak)
    return removed


def _held(proc: Path) -> set[tuple[int, int]]:
    """Device and inode of every file that a visible process has open or mapped from /dev/shm."""
    held = set()
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        for folder in ("fd", "map_files"):
            try:
                entries = list((process / folder).iterdir())
            except OSError:
                continue  # it ended, or belongs to somebody else, whose files are not ours to sweep either
            for entry in entries:
                try:
                    stat = entry.stat()
                except OSError:
                    continue
                held.add((stat.st_dev, stat.st_ino))
    return held
