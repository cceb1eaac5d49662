"""Proving that nothing is left running."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.keeper import descendants

_PR_SET_CHILD_SUBREAPER = 36


def children_of_this_process() -> set[int]:
    """Every live process that descends from the test run."""
    return set(descendants(session=-1, keeper=os.getpid()))


@contextmanager
def nothing_left(within_s: float = 10.0) -> Iterator[None]:
    """Fails where a process started inside outlives the block by more than `within_s`.

    Orphans cannot hide: for the time of the block they become children of this process and not of init.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = children_of_this_process()
    try:
        yield
        end = time.monotonic() + within_s
        while (left := children_of_this_process() - before) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"still running: {[_command(pid) for pid in left]}"
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return f"{pid} {file.read().replace(chr(0), ' ')}"
    except OSError:
        return str(pid)
