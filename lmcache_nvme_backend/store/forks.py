"""Locks end with their process, not with a child that it forked.

A lock (flock) belongs to the open file, which a forked child shares: were its parent killed, the lock would live as
long as the child. So a child closes what its parent has locked, before anything else runs in it.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class HoldsLock(Protocol):
    def leave_to_parent(self) -> None:
        """In a forked child: close the locked file, without unlocking it, and take it for somebody else's."""


_holders: weakref.WeakSet[HoldsLock] = weakref.WeakSet()


def register(holder: HoldsLock) -> None:
    """Have `leave_to_parent` called in every child that is forked while `holder` lives."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        with suppress(OSError):
            holder.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
