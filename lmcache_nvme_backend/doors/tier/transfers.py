"""Jobs between vLLM's host buffer and the store, on a bounded pool of threads.

A chunk of a load is a task, so that one request's chunks come in side by side; a store job is one task that goes
through its chunks in the order of their prefix, so that what follows a refused chunk is refused, and a chunk is never
on disk before what it stands on. Loads go first, since requests wait for them.

Stores write from the buffer's rows. A load reads into a row's worth of memory of its thread's, and only then copies:
a read that hangs in the disk can be given up, and its row be used for something else, while the disk may still write
to where it was told to.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import msgspec
import numpy as np

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.tier.requests import RequestPrefix, split_key
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit

logger = logging.getLogger("vllm.lmcache_nvme_backend")

CUT = "its prefix was cut"
IN_FLIGHT = "too many in flight"
STALLED, GAVE_UP = "stalled", "gave up"
# Loads fail where nothing has been read for this long: the disk hangs, and the prompts can be computed meanwhile.
STALL_S = 30.0
# How often somebody who waits for jobs looks for that.
_LOOK_S = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """A finished job. `done`: the keys that were loaded, or that can be expected to be found from now on. `success`:
    all of a load's, or a store without a failure (a refusal by admission or budget is none)."""

    job_id: int
    request_id: str
    is_load: bool
    keys: Sequence[bytes]
    done: Sequence[bytes]
    success: bool
    seconds: float
    nbytes: int


class _Job:
    def __init__(self, job_id: int, request_id: str, is_load: bool, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self.job_id, self.request_id, self.is_load = job_id, request_id, is_load
        self.keys, self.rows = keys, rows
        self.done: list[bytes] = []
        self.failures = 0
        self.left = len(keys)
        self.began = time.monotonic()
        self.started = 0.0  # when the first of its tasks came to a thread
        self.copying = 0  # tasks that write to the buffer now
        self.given_up = self.over = False

    def ends(self) -> bool:
        """Whether it is over from now on: nothing of it touches the buffer any more. True once; under the lock."""
        if self.over or self.copying or (self.left and not self.given_up):
            return False
        self.over = True
        return True


_Task = Callable[[], None]


class Transfers:
    """`load`, `store` and `finished` belong to one thread and do not wait."""

    def __init__(self, store: ChunkStore, buffer: memoryview, row_bytes: int, threads: int, store_rows: int) -> None:
        """`buffer` is flat; `store_rows` bounds the rows of store jobs that are not finished: each keeps its row from
        being used for anything else. A larger job comes in alone."""
        self._store = store
        self._buffer = buffer
        self._row_bytes = row_bytes
        self._store_rows = store_rows
        self._lock = threading.Condition()
        self._loads: deque[tuple[_Job, _Task]] = deque()
        self._stores: deque[tuple[_Job, _Task]] = deque()
        self._open_jobs = 0
        self._open_loads: set[_Job] = set()
        # When a read, or a chunk's store, ended last, whichever job's: one that waits for its turn has not stalled.
        self._read_at = self._stored_at = 0.0
        self._own = threading.local()
        self._rows_in_flight = 0
        self._closed = False
        self._finished: SimpleQueue[Outcome] = SimpleQueue()
        self.load_failures = Counts()
        self.dropped = Counts()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-io-{i}", daemon=True, args=(i == 0 and threads > 1,))
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- the scheduler's thread

    def load(
        self, job_id: int, request_id: str, prefix: RequestPrefix, keys: Iterable[bytes], rows: Iterable[int]
    ) -> None:
        """Fill these rows with these chunks."""
        job = _Job(job_id, request_id, True, list(keys), [int(row) for row in rows])
        if not prefix.resolved:
            self._give_up(job, "unknown adapter")
            return
        tasks: list[tuple[_Job, _Task]] = []
        for key, row in zip(job.keys, job.rows, strict=True):
            chunk = prefix.key(key)
            pinned = self._store.pin(chunk)
            tasks.append((job, self._load_task(job, key, chunk, row, pinned)))
        self._enter(job, self._loads, tasks)

    def store(
        self, job_id: int, request_id: str, prefix: RequestPrefix, keys: Iterable[bytes], rows: Iterable[int]
    ) -> None:
        """Keep these rows as these chunks, as far as there is room and reason."""
        job = _Job(job_id, request_id, False, list(keys), [int(row) for row in rows])
        with self._lock:
            room = self._rows_in_flight + len(job.keys) <= max(self._store_rows, len(job.keys))
            if room:
                self._rows_in_flight += len(job.keys)
        if not room:
            self._cut_at_head(prefix, job.keys)
            self.dropped.add(IN_FLIGHT, len(job.keys))
            job.failures = len(job.keys)
            self._finish(job)
            return
        self._enter(job, self._stores, [(job, lambda: self._store_job(job, prefix))])

    def finished(self) -> list[Outcome]:
        """Jobs that are over since the last call."""
        self._give_up_stalled()
        found: list[Outcome] = []
        while not self._finished.empty():
            found.append(self._finished.get())
        return found

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until no job touches the buffer any more; False where some still does after the time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            with self._lock:
                if self._lock.wait_for(lambda: self._open_jobs == 0, max(0.0, left)):
                    return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._give_up_stalled()

    def close(self, timeout_s: float) -> bool:
        """Let what is running end, and fail what waits; False where something hangs in the disk."""
        with self._lock:
            self._closed = True
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._lock.notify_all()
        for job, _ in waiting:
            self._part(job, None if job.is_load else job.left, "closed")
        deadline = time.monotonic() + timeout_s
        over = self.wait(timeout_s)
        if not over:
            self._give_up_stalled(0.0)  # reads that hang: they have memory of their own
            over = self.wait(0.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return over

    # --- jobs

    def _enter(self, job: _Job, queue: deque[tuple[_Job, _Task]], tasks: list[tuple[_Job, _Task]]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._open_jobs += 1
                if job.is_load:
                    self._open_loads.add(job)
                queue.extend(tasks)
                self._lock.notify(len(tasks))
        if closed or not tasks:
            self._give_up(job, "closed", entered=not closed)

    def _give_up(self, job: _Job, cause: str, entered: bool = False) -> None:
        job.failures = len(job.keys)
        if job.keys:
            (self.load_failures if job.is_load else self.dropped).add(cause, len(job.keys))
        self._finish(job, entered)

    def _part(self, job: _Job, count: int | None, cause: str) -> None:
        """A part of a job fails without having been tried; `count` keys of it, one where None."""
        number = 1 if count is None else count
        (self.load_failures if job.is_load else self.dropped).add(cause, number)
        with self._lock:
            job.failures += number
            job.left -= number
            last = job.ends()
        if last:
            self._finish(job, entered=True)

    def _give_up_stalled(self, stall_s: float | None = None) -> None:
        """Fail the loads that the disk has kept for too long, as far as they have not come."""
        limit_s, now = STALL_S if stall_s is None else stall_s, time.monotonic()
        ended = []
        with self._lock:
            for job in self._open_loads:
                since = job.started or max(job.began, self._stored_at)
                if job.given_up or job.left == job.copying or now - max(since, self._read_at) <= limit_s:
                    continue
                job.given_up = True
                job.failures += job.left
                self.load_failures.add(STALLED, job.left - job.copying)
                if job.ends():
                    ended.append(job)
        for job in ended:
            logger.warning("lmcache_nvme_backend: no read has ended for %g s: a load is given up", limit_s)
            self._finish(job, entered=True)

    def _finish(self, job: _Job, entered: bool = False) -> None:
        seconds = time.monotonic() - job.began
        if job.is_load:
            done = set(job.done)
            job.done = [key for key in job.keys if key in done]
        success = not job.failures and (not job.is_load or len(job.done) == len(job.keys))
        self._finished.put(
            Outcome(
                job.job_id, job.request_id, job.is_load, job.keys, job.done, success, seconds,
                len(job.done) * self._row_bytes,
            )
        )  # fmt: skip
        with self._lock:
            if entered:
                if not job.is_load:
                    self._rows_in_flight -= len(job.keys)
                self._open_loads.discard(job)
                self._open_jobs -= 1
                self._lock.notify_all()

    def _row(self, row: int) -> memoryview:
        if not 0 <= row < len(self._buffer) // self._row_bytes:
            raise ValueError(f"there is no row {row}")
        return self._buffer[row * self._row_bytes : (row + 1) * self._row_bytes]

    # --- the pool

    def _work(self, stores_first: bool) -> None:
        while True:
            with self._lock:
                while not (self._loads or self._stores or self._closed):
                    self._lock.wait()
                if self._closed:
                    return
                first, second = (self._stores, self._loads) if stores_first else (self._loads, self._stores)
                _, task = (first or second).popleft()
            task()

    def _load_task(self, job: _Job, key: bytes, chunk: ChunkKey, row: int, pinned: bool) -> _Task:
        def load() -> None:
            cause, entered = GAVE_UP, False
            try:
                if not job.given_up:
                    job.started = job.started or time.monotonic()
                    cause = self._read(chunk)
                with self._lock:
                    if job.given_up:
                        cause = GAVE_UP
                    elif not cause:
                        job.copying, entered = job.copying + 1, True
                if not cause:
                    self._copy_to(row)
            except Exception:
                cause = "error"
                logger.exception("lmcache_nvme_backend: a load failed")
            finally:
                if pinned:
                    self._store.unpin(chunk)
                if cause and cause != GAVE_UP:
                    self.load_failures.add(cause)
                with self._lock:
                    job.copying -= entered
                    job.left -= 1
                    if not cause:
                        job.done.append(key)
                    elif cause != GAVE_UP:
                        job.failures += 1
                    last = job.ends()
                if last:
                    self._finish(job, entered=True)

        return load

    def _read(self, chunk: ChunkKey) -> str:
        """Bring a chunk into this thread's own memory; why it could not be, or nothing."""
        scratch: mmap.mmap | None = getattr(self._own, "scratch", None)
        if scratch is None:  # page-aligned, for direct I/O
            scratch = self._own.scratch = mmap.mmap(-1, self._row_bytes)
        with memoryview(scratch) as into:
            result = self._store.get(chunk, into[: self._row_bytes])
        self._read_at = time.monotonic()
        if isinstance(result, Hit):
            return "" if result.nbytes == self._row_bytes else "other size"
        return result.cause.value

    def _copy_to(self, row: int) -> None:
        """numpy copies without holding up the scheduler's thread."""
        with self._row(row) as into:
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(self._own.scratch, np.uint8, self._row_bytes))

    def _store_job(self, job: _Job, prefix: RequestPrefix) -> None:
        try:
            prefix.resolve()
            self._store_chunks(job, prefix)
        except Exception:
            job.failures += 1
            logger.exception("lmcache_nvme_backend: a store failed")
        finally:
            self._finish(job, entered=True)

    def _store_chunks(self, job: _Job, prefix: RequestPrefix) -> None:
        placed = sorted(
            ((prefix.place(key), key, row) for key, row in zip(job.keys, job.rows, strict=True)),
            key=lambda item: item[0].depth,
        )
        reached = 0
        for place, key, row in placed:
            end = prefix.end_of(split_key(key)[0]) or 0
            if prefix.is_cut(end):
                self.dropped.add(CUT)
                continue
            result = None if self._store.known(place.key) else self._store.refusal(place.key, self._row_bytes)
            if result is None:
                with self._row(row) as payload:
                    result = self._store.put(place.key, payload, depth=place.depth, parent=place.parent)
                self._stored_at = time.monotonic()
            if result.kept:
                job.done.append(key)
                reached = max(reached, end)
                continue
            self.dropped.add(result.value)
            job.failures += not result.decided
            if prefix.attention_of(key) is not None:
                prefix.cut(end - 1)
        if reached and prefix.order.hybrid:
            # What a state stands on has been used with it.
            hashes = prefix.hashes[:reached]
            end = prefix.order.reach(hashes, self._store.known)
            self._store.match(prefix.order.upto(hashes, end), again=True)

    def _cut_at_head(self, prefix: RequestPrefix, keys: Iterable[bytes]) -> None:
        """None of these will be stored."""
        for key in keys:
            end = prefix.end_of(split_key(key)[0])
            if end is not None and prefix.attention_of(key) is not None:
                prefix.cut(end - 1)
