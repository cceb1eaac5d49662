"""From LMCache's memory objects to NVMe: write behind, within the step's bound, never half a prefix.

Streamed stores hand out objects without a slot. When the connector asks the next one for its bytes, it has finished
with the one before, which is written behind from then on; so a step of any length passes through the ring.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from lmcache_nvme_backend.doors.counts import PREFIX_LOST, Counts
from lmcache_nvme_backend.doors.lmcache_memory import RingAllocator, SlotMemoryObj, StreamedMemoryObj
from lmcache_nvme_backend.doors.requests import RequestBook, StoreCall, StoreRequest, current_call, entered
from lmcache_nvme_backend.staging import Slot
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, PutResult

logger = logging.getLogger("vllm.lmcache_nvme_backend")

Callback = Callable[[Any], None]


class StoreTarget:
    """A streamed chunk on its way in: nothing → filling (a slot, or the discard slot) → handed over to the writer."""

    __slots__ = ("_obj", "depth", "digest", "handed", "key", "refused", "request", "slot")

    def __init__(self, key: Any, digest: ChunkKey, depth: int, request: StoreRequest) -> None:
        self.key, self.digest, self.depth, self.request = key, digest, depth, request
        # Weak: the object refers to its target, and a cycle would keep its slot until a garbage collection.
        self._obj: weakref.ref[StreamedMemoryObj] | None = None
        self.slot: Slot | None = None
        self.handed = False
        self.refused = False

    @property
    def obj(self) -> StreamedMemoryObj | None:
        return self._obj() if self._obj is not None else None

    def belongs_to(self, obj: StreamedMemoryObj) -> None:
        obj.target = self
        self._obj = weakref.ref(obj)


class ChunkSaver:
    """Stores chunks of one namespace. Never raises; what cannot be stored is dropped and counted by cause.

    ``digest_of`` names a chunk, or answers ``None`` for a key that must not be stored.
    """

    def __init__(
        self,
        store: ChunkStore,
        allocator: RingAllocator | None,
        io_threads: int,
        store_wait_s: float,
        chunk_tokens: int,
        digest_of: Callable[[Any], ChunkKey | None],
    ) -> None:
        self._store, self._allocator, self._digest_of = store, allocator, digest_of
        self._bound_s, self._chunk_tokens = store_wait_s, chunk_tokens
        self._pool = ThreadPoolExecutor(io_threads, "kvtier-write")
        self.book = RequestBook()
        self.dropped = Counts()
        self.waited_s = 0.0  # since the start
        self.step_s = 0.0  # time that steps spent in stores, waits included, since the start
        self._step_began = 0.0
        self._waited_in_step_s = 0.0
        self.step_failed = False
        self._idle = threading.Condition()
        self._in_flight: set[ChunkKey] = set()
        self._closed = False

    # -- bounds -------------------------------------------------------------------------------------------------------

    def load_failed(self, request_id: str | None, first: int) -> None:
        """What is computed of that request from chunk ``first`` on, the end of its hit, rests on memory that was not
        loaded: in this step, and in one that the scheduler may have sent off before it knew."""
        self.step_failed = True
        self.book.request(request_id).refuse(first)

    def start_step(self) -> None:
        """A new engine step: its stores may wait ``nvme.store_wait_ms`` in all."""
        self._waited_in_step_s = 0.0
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        self.step_failed = False
        self.step_s += time.perf_counter() - self._step_began

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """How long the caller may wait now, in seconds; the time it takes counts against the step."""
        begin = time.monotonic()
        yield max(0.0, self._bound_s - self._waited_in_step_s)
        spent = time.monotonic() - begin
        self._waited_in_step_s += spent
        self.waited_s += spent

    def wait_for_writes(self, timeout_s: float) -> bool:
        """Wait until no write is in flight; False where some still are after ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._in_flight, timeout_s)

    def writes(self, digest: ChunkKey | None) -> bool:
        return digest in self._in_flight

    def close(self, wait_s: float) -> None:
        """Take no more; finish what is in flight within ``wait_s`` seconds and abandon the rest."""
        with self._idle:
            self._closed = True
        self.wait_for_writes(wait_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- one LMCacheEngine.store --------------------------------------------------------------------------------------

    @contextmanager
    def storing(self, request_id: str | None, first: int, last: int, streams: bool) -> Iterator[bool]:
        """Around one store of chunks ``first`` to ``last``. Yields False where the prefix has lost a chunk before, or
        where this step computed with memory that was not loaded."""
        call = StoreCall(self.book.request(request_id), first, last, streams and self._allocator is not None)
        if self.step_failed:
            call.request.refuse(first)
            self.dropped.add("failed load", last - first)
            yield False
            return
        if self._store.stands_aside:
            call.request.refuse(first)
            self.dropped.add(PutResult.ASIDE.value, last - first)
            yield False
            return
        call.request.offered_from(first)
        if not call.request.admits(first):
            self.dropped.add(call.request.cause, last - first)
            yield False
            return
        with entered(call):
            yield True
        if call.ran_out:
            call.request.refuse(first + call.submitted)
            self.dropped.add("staging full", (last - first) - call.submitted)

    def target(self, shapes: Any, dtypes: Any, fmt: Any) -> StreamedMemoryObj | None:
        """The object for the chunk that this thread's store works on; ``None`` where it is not streamed."""
        call = current_call()
        if call is None or not call.streams or call.key is None or self._allocator is None:
            return None
        key, call.key = call.key, None
        depth = call.first + call.targets
        digest = self._digest_of(key)
        target = StoreTarget(key, digest or ChunkKey(b""), depth, call.request)
        if digest is None:
            self._refuse(target, "unmarked")
        elif self._store.contains(digest, depth=depth) or self.writes(digest):
            # It is there: its bytes go nowhere, and nothing is lost.
            target.refused, call.request.last = True, digest
        elif call.request.admits(depth) and (refusal := self._refusal(digest)) is not None:
            # Not a loss: what follows would hang in the air all the same, and is counted alike.
            self._refuse(target, refusal.value, refusal.value)
        obj = self._allocator.streamed(
            shapes, dtypes, fmt, lambda: self._fill(call, target), lambda: self._let_go(target)
        )
        if obj is None:
            return None
        target.belongs_to(obj)
        call.targets += 1
        return obj

    def _fill(self, call: StoreCall, target: StoreTarget) -> Slot:
        """The connector asks for ``target``'s memory, so it has finished with the object before it."""
        assert self._allocator is not None
        ring = self._allocator.ring
        if target.handed:  # the writer owns the slot: nobody may look at it, or write to it, any more
            return ring.discard
        if target.slot is not None:
            return target.slot
        if call.filling is not None and call.filling is not target:
            self._hand_over(call.filling)
        call.filling = target
        if not target.refused and not target.request.admits(target.depth):
            self._refuse(target, target.request.cause, target.request.cause)
        if not target.refused:
            with self.waiting() as timeout_s:
                target.slot = ring.acquire(timeout_s, reclaim=True)
            if target.slot is None:
                self._refuse(target, "staging full")
        if target.slot is None:
            target.slot = ring.discard
        return target.slot

    def _refusal(self, digest: ChunkKey) -> PutResult | None:
        """Why a streamed chunk is not to be stored; its size is a slot's at most."""
        assert self._allocator is not None
        return self._store.refusal(digest, self._allocator.ring.slot_bytes)

    def _refuse(self, target: StoreTarget, cause: str, rest: str = PREFIX_LOST) -> None:
        target.refused = True
        target.request.refuse(target.depth, rest)
        self.dropped.add(cause)

    def _let_go(self, target: StoreTarget) -> None:
        slot, target.slot = target.slot, None
        if slot is not None and self._allocator is not None:
            self._allocator.ring.release(slot)

    def _hand_over(self, target: StoreTarget, on_complete: Callback | None = None) -> Future[None] | None:
        """Write a filled target behind, once."""
        obj = target.obj
        if target.handed or target.refused or target.slot is None or obj is None:
            return None
        target.handed = True
        view = target.slot.view[: obj.get_size()]
        # LMCache refers to the object until the whole step is copied; its slot is free as soon as the chunk is written.
        return self._submit(
            target.key,
            target.digest,
            obj,
            view,
            target.depth,
            target.request,
            on_complete,
            lambda: self._let_go(target),
        )

    # -- put ----------------------------------------------------------------------------------------------------------

    def put(self, keys: Any, objs: list[Any], on_complete: Callback | None) -> list[Future[None]]:
        """LMCache's put: the objects are held until their chunk is on disk, dropped or there already."""
        call = current_call()
        request = call.request if call is not None else StoreRequest()
        futures: list[Future[None]] = []
        for key, obj in zip(keys, objs, strict=False):
            depth = call.first + call.submitted if call is not None else 0
            if call is not None:
                call.submitted += 1
            target: StoreTarget | None = getattr(obj, "target", None)
            if target is not None:
                if target.key is not key and target.key != key:
                    # The bytes were announced for another key than they are put under: never store them.
                    if not target.handed:
                        self._refuse(target, "key changed")
                    continue
                future = self._hand_over(target, on_complete)
            else:
                future = self._put_whole(key, obj, depth, request, on_complete)
            if future is not None:
                futures.append(future)
        return futures

    def _put_whole(
        self, key: Any, obj: Any, depth: int, request: StoreRequest, on_complete: Callback | None
    ) -> Future[None] | None:
        digest = self._digest_of(key)
        if digest is None:
            self.dropped.add("unmarked")
            return None
        if not request.admits(depth):
            self.dropped.add(request.cause)
            return None
        known = self._store.contains(digest, depth=depth)
        if not known and (refusal := self._store.refusal(digest, obj.get_size())) is not None:
            request.refuse(depth, refusal.value)
            self.dropped.add(refusal.value)
            return None
        view = obj.payload() if isinstance(obj, SlotMemoryObj) else obj.byte_array
        return self._submit(key, digest, obj, view[: obj.get_size()], depth, request, on_complete)

    def _submit(
        self,
        key: Any,
        digest: ChunkKey,
        obj: Any,
        view: memoryview,
        depth: int,
        request: StoreRequest,
        on_complete: Callback | None,
        written: Callable[[], None] = lambda: None,
    ) -> Future[None] | None:
        parent = self.book.parent(digest) or request.last
        request.last = digest
        with self._idle:
            if self._closed:
                self.dropped.add("closed")
                return None
            if digest in self._in_flight:
                return None
            self._in_flight.add(digest)
        obj.ref_count_up()
        try:
            return self._pool.submit(self._write, key, digest, obj, view, depth, parent, request, on_complete, written)
        except RuntimeError:  # the pool was shut down between the check and here
            self.dropped.add("closed")
            written()
            self._written(digest, obj)
            return None

    def _write(
        self,
        key: Any,
        digest: ChunkKey,
        obj: Any,
        view: memoryview,
        depth: int,
        parent: ChunkKey | None,
        request: StoreRequest,
        on_complete: Callback | None,
        written: Callable[[], None],
    ) -> None:
        stored = False
        try:
            if not request.admits(depth):
                self.dropped.add(request.cause)
                return
            result = self._store.put(digest, view, depth=depth, parent=parent, tokens=int(obj.get_num_tokens()))
            stored = result.kept
            if not stored:
                request.refuse(depth, result.value if result is PutResult.WRITE_BUDGET else PREFIX_LOST)
                self.dropped.add(result.value)
            elif result is PutResult.STORED and not request.admits(depth):
                # A predecessor was lost while this one was on its way: it would only take room.
                self._store.remove(digest)
                self.dropped.add(request.cause)
        except Exception:
            request.refuse(depth)
            self.dropped.add("internal error")
            logger.exception("lmcache_nvme_backend: storing a chunk failed")
        finally:
            written()
            self._written(digest, obj)
        if stored and on_complete is not None:
            try:
                on_complete(key)
            except Exception:
                logger.exception("lmcache_nvme_backend: a completion callback failed")

    def _written(self, digest: ChunkKey, obj: Any) -> None:
        obj.ref_count_down()
        with self._idle:
            self._in_flight.discard(digest)
            self._idle.notify_all()
