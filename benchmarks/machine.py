"""What a benchmark has to know of the machine: its facts for the report, its page cache, the memory of a process."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_nvme_backend.store.direct_io import file_system_type

_SAMPLE_S = 0.005


def machine(directory: Path) -> dict[str, Any]:
    """The facts that a figure depends on; no names of hosts, users or paths."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    total_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_kib / 2**20, 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system_type(str(directory.resolve())),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines()


def drop_page_cache(directory: Path) -> None:
    """Leave nothing of `directory` in the page cache: file by file, and the kernel's whole cache where that is ours."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        pass  # not root: the files' own pages are gone all the same


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class PeakGrowth:
    """How far the resident memory rose above where it stood at the beginning."""

    nbytes = 0


@contextmanager
def peak_growth() -> Iterator[PeakGrowth]:
    """Watches this process: by the kernel's own high-water mark where it can be reset, else by sampling."""
    found, before = PeakGrowth(), resident_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        with _sampled() as peak:
            yield found
        found.nbytes = max(0, peak[0] - before)
        return
    yield found
    high = next(int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith("VmHWM"))
    found.nbytes = max(0, high * 1024 - before)


@contextmanager
def _sampled() -> Iterator[list[int]]:
    peak, stop = [resident_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(_SAMPLE_S):
            peak[0] = max(peak[0], resident_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], resident_bytes())


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def tool_version(command: str) -> str | None:
    """The first line that `command --version` prints, None where there is no such program."""
    try:
        return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None
