"""The ring of slots that chunks pass through: the only host memory the tier owns.

Contract
- ``acquire`` hands out a free slot or, after its bound, nothing. Any thread may call it.
- ``release`` gives a slot back exactly once; a second release of the same loan is ignored, so that an explicit release
  and a finaliser can both run.
- The ring never grows. ``free`` plus the loans outstanding is always ``slots``.
- ``discard`` is one more slot's worth of memory that is never lent: bytes that nobody will read go there, from any
  number of threads at once.
- A *lender* holds slots ahead of need and gives one back when somebody who needs one now finds none.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from lmcache_nvme_backend.staging.memory import StagingMemory

PAGE = 4096
# A lender whose reads are still running has nothing to give back yet: who waits asks again this often.
ASK_AGAIN_S = 0.005


class Slot:
    """A loan of one slot. ``view`` spans the slot's whole capacity (bytes, a multiple of the page)."""

    __slots__ = ("_loaned", "offset", "view")

    def __init__(self, offset: int, view: memoryview) -> None:
        self.offset = offset  # of the slot in the ring's memory, in bytes
        self.view = view
        self._loaned = True


class Lender(Protocol):
    """Who holds slots that can be done without for now."""

    def give_back(self) -> bool:
        """Release one such slot; False where there is none. Called from any thread, without the ring's lock."""
        ...


class StagingRing:
    """Equal, page-aligned slots of ``slot_bytes`` each within one mapping.

    Where the mapping holds only two, both are needed, and ``more(nbytes)`` makes the memory of the discard slot.
    """

    def __init__(
        self, memory: StagingMemory, chunk_bytes: int, more: Callable[[int], StagingMemory] = StagingMemory
    ) -> None:
        self.memory = memory
        self._more = more
        self._spare: StagingMemory | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._lenders: weakref.WeakSet[Lender] = weakref.WeakSet()
        self._divide(chunk_bytes)

    def _divide(self, chunk_bytes: int) -> None:
        self.slot_bytes = -(-chunk_bytes // PAGE) * PAGE
        whole = self.memory.nbytes // self.slot_bytes
        if self._spare is not None:
            self._spare.close()
        self._spare = self._more(self.slot_bytes) if whole < 3 else None
        self.slots = whole if whole < 3 else whole - 1
        discard = self._spare.view if self._spare is not None else self._view(self.slots)
        self.discard = Slot(self.slots * self.slot_bytes, discard)
        self._free = list(range(self.slots))

    def fit(self, chunk_bytes: int) -> bool:
        """Make the slots large enough for such a chunk; False where slots are on loan or fewer than two would fit.

        The size is known for good only when the engine's layer groups are, after the ring was made.
        """
        with self._changed:
            if chunk_bytes <= self.slot_bytes:
                return True
            whole = self.memory.nbytes // (-(-chunk_bytes // PAGE) * PAGE)
            # Two slots need a discard slot beside them, which would have to be pinned while the engine runs.
            if len(self._free) < self.slots or whole < 2 or (whole < 3 and self.memory.pinned):
                return False
            self._divide(chunk_bytes)
            return True

    @property
    def pinned(self) -> bool:
        """Whether the device knows all of the ring's memory."""
        return self.memory.pinned and (self._spare is None or self._spare.pinned)

    def _view(self, index: int) -> memoryview:
        return self.memory.view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory the ring can ever hold resident."""
        return self.memory.nbytes + (self._spare.nbytes if self._spare is not None else 0)

    @property
    def free(self) -> int:
        return len(self._free)

    def add_lender(self, lender: Lender) -> None:
        """``lender`` may be asked for slots from now on, for as long as it lives."""
        with self._changed:
            self._lenders.add(lender)

    def acquire(self, timeout_s: float = 0.0, reclaim: bool = False) -> Slot | None:
        """A free slot, waiting up to ``timeout_s`` seconds for one; ``None`` when there is none by then.

        With ``reclaim``, slots that others hold ahead of need are taken back first.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if reclaim and not self._free:
                self._reclaim()
            with self._changed:
                if self._closed:
                    return None
                if self._free:
                    index = self._free.pop()
                    return Slot(index * self.slot_bytes, self._view(index))
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, ASK_AGAIN_S) if reclaim else left)

    def _reclaim(self) -> None:
        with self._changed:
            lenders = list(self._lenders)
        for lender in lenders:
            if lender.give_back():
                return

    def release(self, slot: Slot) -> None:
        with self._changed:
            if not slot._loaned or slot is self.discard:
                return
            slot._loaned = False
            self._free.append(slot.offset // self.slot_bytes)
            self._changed.notify()

    def close(self) -> None:
        """No loan is given any more; waiters wake with nothing. Loans still out may be released later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.memory.close()
        if self._spare is not None:
            self._spare.close()
