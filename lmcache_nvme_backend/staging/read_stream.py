"""Chunks read through the ring in order, ahead of whoever consumes them.

Contract
- ``take(i)`` is called by one consumer, for rising ``i``. It waits for chunk ``i`` and answers with its slot; by asking
  for ``i`` the consumer says that it is done issuing work on every chunk before ``i``.
- A slot is used again when the device has finished with it: ``fence()`` is called in the consumer's context after each
  chunk and answers with an event (``query``, ``synchronize``), or ``None`` where the consumer's work is done at once.
- A chunk that cannot be read makes the stream *failed* from its index on. ``take`` still answers with valid memory,
  whose content is worthless, so that a consumer who cannot stop in the middle need not.
- Until the first ``take``, the ring may have read-ahead slots back; they are read again when needed.
- ``release(i)`` and ``close`` may come from any thread, in any order, any number of times.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from lmcache_nvme_backend.staging.ring import Slot, StagingRing

# The consumed chunk waits this long for a slot. Writes behind and other streams give theirs back in the time of one
# transfer, so only a drive that hangs reaches it; then the chunk is a failed one.
SLOT_WAIT_S = 10.0


class Fence(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Chunk:
    __slots__ = ("done", "reading", "slot")

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.reading: Future[bool] | None = None
        self.done = False  # released, or retired by a later take


class ReadStream:
    """``reads[i](view)`` fills a slot with chunk ``i`` and answers whether that worked; it runs on ``pool``."""

    def __init__(
        self,
        ring: StagingRing,
        pool: Executor,
        reads: Sequence[Callable[[memoryview], bool]],
        ahead: int,
        fence: Callable[[], Fence | None] = lambda: None,
    ) -> None:
        self._ring, self._pool, self._reads, self._fence = ring, pool, reads, fence
        self._ahead = ahead
        self._chunks = [_Chunk() for _ in reads]
        self._lock = threading.RLock()
        self._consumed = -1
        self._draining: deque[tuple[Fence, Slot]] = deque()
        self._closed = False
        self.failed: int | None = None
        ring.add_lender(self)
        self._read_ahead()

    def take(self, i: int) -> Slot:
        """Chunk ``i``'s slot; the discard slot where it, or one before it, could not be read."""
        with self._lock:
            for earlier in range(max(self._consumed, 0), i):
                self._retire(earlier)
            self._consumed = max(self._consumed, i)
            if self._closed or self._chunks[i].done:
                self._fail(i)
            if self.failed is not None and i >= self.failed:
                return self._ring.discard
            chunk = self._chunks[i]
            if chunk.slot is None:
                self._drain(everything=False)
                slot = self._ring.acquire(0.0, reclaim=True)
                if slot is None:
                    self._drain(everything=True)
                    slot = self._ring.acquire(SLOT_WAIT_S, reclaim=True)
                if slot is None:
                    self._fail(i)
                    return self._ring.discard
                self._start(i, slot)
            self._read_ahead()
            reading = chunk.reading
        ok = reading is not None and _succeeded(reading)
        with self._lock:
            slot = chunk.slot if ok else None
            if slot is None:  # it could not be read, or was given back while we waited
                self._fail(i)
                return self._ring.discard
            return slot

    def release(self, i: int) -> None:
        """The consumer's last reference to chunk ``i`` is gone, and the device has finished with it."""
        with self._lock:
            self._drain(everything=False)
            self._drop(i)
            if all(chunk.done for chunk in self._chunks):
                self.close()

    def close(self) -> None:
        """Give every slot back: at once, or when the read or the device that uses it has finished."""
        with self._lock:
            self._closed = True
            for i in range(len(self._chunks)):
                self._drop(i)
            self._drain(everything=True)

    def give_back(self) -> bool:
        """The farthest chunk read ahead, while nobody consumes yet.

        Never waits for the lock: two streams that ask each other must not wait for each other.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._consumed >= 0 or self._closed:
                return False
            for chunk in reversed(self._chunks):
                if chunk.slot is not None and chunk.reading is not None and chunk.reading.done():
                    slot, chunk.slot, chunk.reading = chunk.slot, None, None
                    self._ring.release(slot)
                    return True
            return False
        finally:
            self._lock.release()

    def __del__(self) -> None:
        self.close()

    # All below are called with the lock held.

    def _read_ahead(self) -> None:
        for i in range(max(self._consumed, 0), min(len(self._chunks), max(self._consumed, 0) + self._ahead + 1)):
            chunk = self._chunks[i]
            if self.failed is not None or self._closed:
                return
            if chunk.slot is None and not chunk.done:
                self._drain(everything=False)
                slot = self._ring.acquire()
                if slot is None:
                    return
                self._start(i, slot)

    def _start(self, i: int, slot: Slot) -> None:
        chunk = self._chunks[i]
        chunk.slot = slot
        try:
            chunk.reading = self._pool.submit(self._reads[i], slot.view)
        except RuntimeError:  # the pool is shut down
            chunk.slot = None
            self._ring.release(slot)
            self._fail(i)

    def _fail(self, i: int) -> None:
        self.failed = i if self.failed is None else min(self.failed, i)

    def _retire(self, i: int) -> None:
        """The consumer has issued its work on chunk ``i``."""
        chunk = self._chunks[i]
        if chunk.done or chunk.slot is None:
            chunk.done = True
            return
        fence = self._fence()
        if fence is None:
            self._drop(i)
            return
        self._draining.append((fence, chunk.slot))
        chunk.slot, chunk.done = None, True

    def _drain(self, everything: bool) -> None:
        while self._draining:
            fence, slot = self._draining[0]
            if everything:
                fence.synchronize()
            elif not fence.query():
                return
            self._draining.popleft()
            self._ring.release(slot)

    def _drop(self, i: int) -> None:
        chunk = self._chunks[i]
        chunk.done = True
        slot, chunk.slot = chunk.slot, None
        if slot is None:
            return
        reading = chunk.reading
        if reading is None or reading.done() or reading.cancel():
            self._ring.release(slot)
        else:  # the drive still writes into it
            ring = self._ring
            reading.add_done_callback(lambda _: ring.release(slot))


def _succeeded(reading: Future[bool]) -> bool:
    try:
        return reading.result()
    except Exception:  # a read that raises, or was cancelled by a close, is a read that failed
        return False
