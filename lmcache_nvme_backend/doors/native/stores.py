"""From the device's blocks to the drive: read into a slot in the order of the prefix, written behind from there.

vLLM may hand a block to somebody else once `wait` for its job has returned, or the job has been reported. So a job is
over when its blocks have been read, or given up; what becomes of the writes is the store's to know. Never half a
prefix: behind a chunk that was lost, nothing is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache_nvme_backend.doors.counts import PREFIX_LOST, Counts
from lmcache_nvme_backend.doors.hybrid_prefix import Place
from lmcache_nvme_backend.doors.native.copies import Copier
from lmcache_nvme_backend.doors.native.jobs import Jobs
from lmcache_nvme_backend.doors.native.layout import ChunkBlocks, GroupLayout
from lmcache_nvme_backend.staging import Slot, StagingRing
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, PutResult

# A chunk waits this long for a slot, on a thread of its own. A drive that works gives one back in milliseconds; with
# one that hangs, chunks are lost instead of keeping requests that were preempted from coming back.
SLOT_WAIT_S = 5.0
# How soon a job that was given up notices while it waits for a slot.
ASK_AGAIN_S = 0.02
# Lost chunks that are remembered, so that what follows them is not kept.
LOST_REMEMBERED = 65_536

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class StoreJob:
    """One store of vLLM's: chunks in the order of their prefix."""

    def __init__(self, job_id: int, chunks: list[tuple[Place, ChunkBlocks]], mark: Any) -> None:
        self.job_id, self.chunks, self.mark = job_id, chunks, mark
        self.nbytes, self.began, self.seconds = 0, time.monotonic(), 0.0
        self.given_up = self.copying = self.over = False  # guarded, with `chunks`, by the condition of `ChunkStores`


class ChunkStores:
    """Stores from the device's blocks. Never raises; `finished` and `wait` are for one thread, the engine's."""

    def __init__(
        self,
        store: ChunkStore,
        ring: StagingRing,
        copier: Copier,
        layouts: Sequence[GroupLayout],
        tokens: Sequence[int],
        threads: int,
        changed: threading.Condition,
    ) -> None:
        self._store, self._ring, self._copier, self._layouts, self._tokens = store, ring, copier, layouts, tokens
        self._pool = ThreadPoolExecutor(threads, "kvtier-write")
        self._changed = changed
        self._queue: deque[StoreJob] = deque()
        self.jobs = Jobs[StoreJob](changed)
        self._writing: set[ChunkKey] = set()
        self._lost: dict[ChunkKey, None] = {}
        self._closed = False
        self.dropped = Counts()
        self.waited_s = 0.0
        self._reader = threading.Thread(target=self._read_jobs, name="kvtier-store", daemon=True)
        self._reader.start()

    def submit(self, job_id: int, places: Sequence[Place], chunks: Sequence[ChunkBlocks], mark: Any) -> None:
        """Begin to store; `chunks[i]` says where the bytes of `places[i]` come from."""
        pairs = sorted(zip(places, chunks, strict=True), key=lambda pair: pair[0].depth)
        job = StoreJob(job_id, pairs, mark)
        with self._changed:
            self.jobs.add(job)
            if self._closed:
                self._end(job, "closed")
            else:
                self._queue.append(job)
            self._changed.notify_all()

    # -- the thread that reads the device -----------------------------------------------------------------------------

    def _read_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job = self._queue.popleft()
            try:
                self._read(job)
            except Exception:
                logger.exception("lmcache_nvme_backend: storing a chunk failed")
                self.dropped.add("internal error")
            with self._changed:
                self._end(job, "gave up")

    def _read(self, job: StoreJob) -> None:
        while (head := self._head(job)) is not None:
            place, chunk = head
            slot, cause = self._slot_for(job, place, chunk)
            if slot is None:
                if job.given_up:
                    return
                if cause is not None:
                    self._lose(place.key, cause)
                self._pass(job)
                continue
            if not self._enter_copy(job, place.key):
                self._forget(place.key, slot)
                return
            layout, copied = self._layouts[chunk.group], 0
            try:
                self._copier.to_slot(slot, layout, chunk.runs, job.mark)
                copied = layout.nbytes
            finally:
                self._leave_copy(job, copied)
                if not copied:
                    self._forget(place.key, slot)
            try:
                self._pool.submit(self._write, place, chunk.group, slot)
            except RuntimeError:  # shut down
                self._forget(place.key, slot)
                self._lose(place.key, "closed")

    def _head(self, job: StoreJob) -> tuple[Place, ChunkBlocks] | None:
        with self._changed:
            return job.chunks[0] if job.chunks else None

    def _pass(self, job: StoreJob) -> None:
        """Go on without the first chunk, unless the job was given up meanwhile, with that one."""
        with self._changed:
            if not job.over:
                job.chunks.pop(0)

    def _enter_copy(self, job: StoreJob, key: ChunkKey) -> bool:
        """Before the device is read; False where it must not be any more."""
        with self._changed:
            if job.given_up:
                self._remember_lost(key)
                return False
            job.copying = True
            return True

    def _leave_copy(self, job: StoreJob, nbytes: int) -> None:
        with self._changed:
            job.copying = False
            job.nbytes += nbytes
            if nbytes:
                job.chunks.pop(0)
            self._changed.notify_all()

    def _slot_for(self, job: StoreJob, place: Place, chunk: ChunkBlocks) -> tuple[Slot | None, str | None]:
        """A slot, or why there is none; no cause where the chunk need not be stored."""
        if job.given_up:
            return None, None
        if not chunk.whole:
            return None, "partial"
        if self._store.stands_aside:
            return None, PutResult.ASIDE.value
        if self._is_lost(place.parent):
            return None, PREFIX_LOST
        with self._changed:
            if place.key in self._writing:
                return None, None
        if self._store.pin(place.key):
            self._store.unpin(place.key)
            return None, None
        deadline = time.monotonic() + SLOT_WAIT_S
        slot = self._ring.acquire()
        began = time.monotonic()
        while slot is None and not job.given_up and time.monotonic() < deadline:
            slot = self._ring.acquire(ASK_AGAIN_S)
        self.waited_s += time.monotonic() - began
        if slot is None:
            return None, None if job.given_up else "staging full"
        with self._changed:
            self._writing.add(place.key)
            self._lost.pop(place.key, None)  # it has another chance, and what follows it with it
        return slot, None

    # -- the threads that write ---------------------------------------------------------------------------------------

    def _write(self, place: Place, group: int, slot: Slot) -> None:
        try:
            if self._is_lost(place.parent):
                self._lose(place.key, PREFIX_LOST)
                return
            view = slot.view[: self._layouts[group].nbytes]
            result = self._store.put(
                place.key, view, depth=place.depth, parent=place.parent, tokens=self._tokens[group]
            )
            if not result.kept:
                self._lose(place.key, result.value)
            elif result is PutResult.STORED and self._is_lost(place.parent):
                # Its predecessor was lost while this one was on its way: it would only take room.
                self._store.remove(place.key)
                self._lose(place.key, PREFIX_LOST)
        except Exception:
            logger.exception("lmcache_nvme_backend: writing a chunk failed")
            self._lose(place.key, "internal error")
        finally:
            self._forget(place.key, slot)

    def _forget(self, key: ChunkKey, slot: Slot) -> None:
        self._ring.release(slot)
        with self._changed:
            self._writing.discard(key)
            self._changed.notify_all()

    def _lose(self, key: ChunkKey, cause: str) -> None:
        self.dropped.add(cause)
        with self._changed:
            self._remember_lost(key)

    def _remember_lost(self, key: ChunkKey) -> None:
        """With the condition held."""
        self._lost[key] = None
        while len(self._lost) > LOST_REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def _is_lost(self, parent: ChunkKey | None) -> bool:
        """Whether a chunk's predecessor was lost, and nobody has stored it since."""
        if parent is None or parent not in self._lost:
            return False
        return self._store.match((parent,), again=True) == 0

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _end(self, job: StoreJob, cause: str) -> None:
        """With the condition held: nothing of this job reads the device from now on."""
        if job.over:
            return
        job.over = True
        job.seconds = time.monotonic() - job.began
        left, job.chunks = job.chunks, []
        for place, _ in left:
            self.dropped.add(cause)
            self._remember_lost(place.key)
        self.jobs.end(job)

    def finished(self) -> list[StoreJob]:
        """The jobs that are over since the last call."""
        return self.jobs.report()

    def wait(self, job_ids: set[int], timeout_s: float) -> None:
        """Until nothing of these jobs reads the device; what takes longer than `timeout_s` is given up and lost."""
        with self._changed:
            jobs = self.jobs.named(job_ids)
            self._changed.wait_for(lambda: all(job.over for job in jobs), timeout_s)
            for job in jobs:
                job.given_up = True
            # Only a chunk that is being copied is waited for: the thread may hang in the drive with the next one.
            self._changed.wait_for(lambda: not any(job.copying for job in jobs))
            for job in jobs:
                self._end(job, "gave up")

    def wait_for_writes(self, timeout_s: float) -> bool:
        """Until nothing is on its way to the drive; False where something still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writing and not self._queue, timeout_s)

    def close(self, wait_s: float) -> None:
        """Take no more, finish what is on its way within `wait_s` seconds and abandon the rest."""
        self.wait_for_writes(wait_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reader.join(wait_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
