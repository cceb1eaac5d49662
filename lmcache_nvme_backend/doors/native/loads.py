"""From the drive to the device's blocks, in threads of their own.

A job is one request's load. Its chunks are read and copied by several threads at once, each through a slot of its own;
no thread waits for another one while it holds a slot. A job is *over* when nothing of it touches the device any more:
only then is it reported, since vLLM hands its blocks to somebody else after a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.native.copies import Copier
from lmcache_nvme_backend.doors.native.jobs import Jobs
from lmcache_nvme_backend.doors.native.layout import ChunkBlocks, GroupLayout
from lmcache_nvme_backend.staging import StagingRing
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit

# A read waits this long for a slot. Others give theirs back in the time of one transfer, so only a drive that hangs
# reaches it; then the chunk is one that could not be loaded.
SLOT_WAIT_S = 10.0
# Jobs fail where nothing has moved for this long: the drive hangs, and the prompts can be computed meanwhile.
STALL_S = 30.0

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class LoadJob:
    """One request's load. `failed` holds the chunks that could not be loaded."""

    def __init__(self, job_id: int, chunks: int, over: Callable[[LoadJob], None]) -> None:
        self.job_id, self.failed = job_id, set[ChunkKey]()
        self.nbytes, self.began, self.seconds = 0, time.monotonic(), 0.0
        self._left, self._over = chunks, over
        self._copying = 0
        self._given_up = self._reported = False
        self._lock = threading.Lock()
        self.moved_at = self.began

    @property
    def success(self) -> bool:
        return not self.failed and not self._given_up

    @property
    def wanted(self) -> bool:
        """Whether its further chunks are still of use."""
        return self.success

    @property
    def given_up(self) -> bool:
        return self._given_up

    def enter_copy(self) -> bool:
        """Before bytes go to the device; False where they must not any more."""
        with self._lock:
            if self._given_up or self._reported:
                return False
            self._copying += 1
            return True

    def leave_copy(self, nbytes: int) -> None:
        with self._lock:
            self._copying -= 1
            self.nbytes += nbytes
            self.moved_at = time.monotonic()
            over = self._is_over()
        if over:
            self._over(self)

    def chunk_done(self) -> None:
        with self._lock:
            self._left -= 1
            over = self._is_over()
        if over:
            self._over(self)

    def give_up(self, chunks: set[ChunkKey]) -> None:
        """Fail now, whatever still reads. Copies that run are waited for by whoever waits for the job."""
        with self._lock:
            self._given_up = True
            self.failed |= chunks
            over = self._is_over()
        if over:
            self._over(self)

    def _is_over(self) -> bool:
        if self._reported or self._copying or (self._left and not self._given_up):
            return False
        self._reported = True
        self.seconds = time.monotonic() - self.began
        return True


class ChunkLoads:
    """Loads into the device's blocks. Never raises; `finished` and `wait` are for one thread, the engine's."""

    def __init__(
        self,
        store: ChunkStore,
        ring: StagingRing,
        copier: Copier,
        layouts: Sequence[GroupLayout],
        threads: int,
        changed: threading.Condition,
    ) -> None:
        self._store, self._ring, self._copier, self._layouts = store, ring, copier, layouts
        self._pool = ThreadPoolExecutor(threads, "kvtier-load")
        self._changed = changed
        self.jobs = Jobs[LoadJob](changed)
        self._pins: dict[int, list[ChunkKey]] = {}
        self._moved_at = 0.0  # when the drive answered last, whatever job: one that waits for its turn does not stall
        self.failed = Counts()
        self.loaded = 0

    def submit(self, job_id: int, keys: Sequence[ChunkKey], chunks: Sequence[ChunkBlocks], mark: Any) -> None:
        """Begin to load; `chunks[i]` says where the bytes of `keys[i]` go."""
        job = LoadJob(job_id, len(keys), self.jobs.end)
        self.jobs.add(job)
        self._pins[job_id] = [key for key in keys if self._store.pin(key)]
        if not keys:
            job.give_up(set())
            return
        for key, chunk in zip(keys, chunks, strict=True):
            try:
                self._pool.submit(self._load, job, key, chunk, mark)
            except RuntimeError:  # shut down
                self.failed.add("closed")
                job.give_up({key})
                return

    def _load(self, job: LoadJob, key: ChunkKey, chunk: ChunkBlocks, mark: Any) -> None:
        try:
            if job.wanted and (cause := self._move(job, key, chunk, mark)) is not None:
                self.failed.add(cause)
                job.failed.add(key)
        except Exception:
            logger.exception("lmcache_nvme_backend: loading a chunk failed")
            self.failed.add("internal error")
            job.failed.add(key)
        finally:
            job.chunk_done()

    def _move(self, job: LoadJob, key: ChunkKey, chunk: ChunkBlocks, mark: Any) -> str | None:
        """Why it could not be loaded, if so."""
        layout = self._layouts[chunk.group]
        slot = self._ring.acquire(SLOT_WAIT_S)
        if slot is None:
            return "staging full"
        try:
            result = self._store.get(key, slot.view)
            self._moved_at = time.monotonic()
            if not isinstance(result, Hit):
                return result.cause.value
            if result.nbytes != layout.nbytes:
                return "other size"
            if not job.enter_copy():
                return "gave up"
            try:
                self._copier.to_device(slot, layout, chunk.runs, mark)
            finally:
                job.leave_copy(layout.nbytes)
            self.loaded += 1
            return None
        finally:
            self._ring.release(slot)

    def finished(self) -> list[LoadJob]:
        """The jobs that are over since the last call."""
        now = time.monotonic()
        for job in self.jobs:
            if now - max(job.moved_at, self._moved_at) > STALL_S and not job.given_up:
                self.failed.add("stalled")
                job.give_up(set(self._pins[job.job_id]))
        done = self.jobs.report()
        for job in done:
            for key in self._pins.pop(job.job_id):
                self._store.unpin(key)
        return done

    def wait(self, job_ids: set[int], timeout_s: float) -> None:
        """Until nothing of these jobs touches the device; those that take longer than `timeout_s` fail."""
        jobs = self.jobs.named(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: all(map(self.jobs.is_over, jobs)), timeout_s)
        for job in jobs:
            if not self.jobs.is_over(job):
                job.give_up(set(self._pins[job.job_id]))
        with self._changed:  # a copy that runs takes a moment
            self._changed.wait_for(lambda: all(map(self.jobs.is_over, jobs)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self.jobs:
            job.give_up(set())
