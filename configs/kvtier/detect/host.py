"""RAM, swap, /dev/shm, cores and limits, from /proc and the kernel's own calls."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec


class Ram(msgspec.Struct, frozen=True):
    """Bytes, from /proc/meminfo and /proc/swaps. In a container the smaller of that and the cgroup's limit."""

    total: int
    available: int
    swap: int
    zram: int


def ram(root: Path) -> Ram:
    """Memory of the host, or of the cgroup where that is less. Zeroes where /proc is missing."""
    values = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024 if rest.split() else 0
    total, available = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    limit, used = _number(root / "sys/fs/cgroup/memory.max"), _number(root / "sys/fs/cgroup/memory.current") or 0
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - used)
    return Ram(total, max(available, 0), values.get("SwapTotal", 0), _zram(root))


def shm(root: Path) -> tuple[int, int]:
    """Total and free bytes of /dev/shm; zeroes where there is none."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return 0, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def physical_cores(root: Path) -> int:
    """Cores without their sibling threads, as far as this process may use them."""
    allowed = len(os.sched_getaffinity(0)) if root == Path("/") else None
    siblings = {
        path.read_text().strip()
        for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    found = len(siblings) or sum(line.startswith("processor") for line in _lines(root / "proc/cpuinfo")) or 1
    return min(found, allowed) if allowed else found


def open_files() -> tuple[int, int]:
    """Soft and hard limit on file descriptors of this process; -1 (none) is given as 2**31 - 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**31 - 1
    return (most if soft < 0 else soft), (most if hard < 0 else hard)


def in_container(root: Path) -> bool:
    """Docker and Podman leave a marker file; Kubernetes sets a variable."""
    return (
        any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def in_wsl(root: Path) -> bool:
    """WSL2's kernel says so in its release."""
    return any("microsoft" in line.lower() for line in _lines(root / "proc/sys/kernel/osrelease"))


def _zram(root: Path) -> int:
    return sum(
        int(fields[2]) * 1024
        for line in _lines(root / "proc/swaps")[1:]
        if len(fields := line.split()) > 2 and fields[0].startswith("/dev/zram")
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None
