"""The ring of slots that chunks pass through: the only host memory the tier owns.

Contract
- ``acquire`` hands out a free slot or, after its bound, nothing. Any thread may call it.
- ``release`` gives a slot back exactly once; a second release of the same loan is ignored, so that an explicit release
  and a finaliser can both run.
- The ring never grows. ``free`` plus the loans outstanding is always ``slots``.
"""

from __future__ import annotations

import threading
import time

from lmcache_nvme_backend.staging.memory import StagingMemory

PAGE = 4096


class Slot:
    """A loan of one slot. ``view`` spans the slot's whole capacity (bytes, a multiple of the page)."""

    __slots__ = ("_loaned", "index", "view")

    def __init__(self, index: int, view: memoryview) -> None:
        self.index = index
        self.view = view
        self._loaned = True


class StagingRing:
    """``slots`` equal, page-aligned slots of ``slot_bytes`` each within one mapping."""

    def __init__(self, memory: StagingMemory, chunk_bytes: int) -> None:
        self.memory = memory
        self.slot_bytes = -(-chunk_bytes // PAGE) * PAGE
        self.slots = memory.nbytes // self.slot_bytes
        self._free = list(range(self.slots))
        self._changed = threading.Condition()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory the ring can ever hold resident."""
        return self.memory.nbytes

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, timeout_s: float = 0.0) -> Slot | None:
        """A free slot, waiting up to ``timeout_s`` seconds for one; ``None`` when there is none by then."""
        with self._changed:
            if not self._free and timeout_s > 0:
                deadline = time.monotonic() + timeout_s
                while not self._free and not self._closed:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
            if not self._free or self._closed:
                return None
            index = self._free.pop()
        start = index * self.slot_bytes
        return Slot(index, self.memory.view[start : start + self.slot_bytes])

    def release(self, slot: Slot) -> None:
        with self._changed:
            if not slot._loaned:
                return
            slot._loaned = False
            self._free.append(slot.index)
            self._changed.notify()

    def close(self) -> None:
        """No loan is given any more; waiters wake with nothing. Loans still out may be released later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.memory.close()
