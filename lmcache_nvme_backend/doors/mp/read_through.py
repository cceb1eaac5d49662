"""A store that several hosts share, behind this one: what others stored is served, and kept here.

Chunks go there as they are stored here, in copies, so that neither a request nor LMCache's memory waits for a network.
A lookup asks there, within a bound, for what is not here. What is loaded is verified, served, and written to this
host's own store behind the request. Where the other store is slow or gone, a lookup finds what is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.mp.buffers import Buffer, Buffers
from lmcache_nvme_backend.doors.mp.lookups import Found
from lmcache_nvme_backend.doors.mp.objects import Lease, bytes_of
from lmcache_nvme_backend.doors.mp.remote import Remote
from lmcache_nvme_backend.doors.mp.sealed import SEAL_BYTES, is_whole, seal_of
from lmcache_nvme_backend.doors.mp.spaces import Chunk
from lmcache_nvme_backend.store import PutResult

logger = init_logger("lmcache_nvme_backend")

# Loads in flight to the store behind: enough to fill a network of 25 Gbit/s with chunks of some MiB.
FETCH_THREADS: Final = 8
KEEP_THREADS: Final = 2
# A batch that is to be shared waits this long for buffers in all. No request waits with it, but LMCache's memory does,
# and so do the batches behind it, which this host's own store is to have: a slow network must not hold them up.
OFFER_WAIT_S: Final = 1.0
# Beside the lookup's bound a load may take the time that its bytes need at this rate: a network of 1 Gbit/s.
SLOWEST_BYTES_PER_S: Final = 100e6


class ReadThrough:
    """Thread-safe; nothing raises.

    Args:
        limit_bytes: host memory for copies in flight.
        timeout_s: how long a lookup may wait.
        on_kept: called with key, chunk and bytes when a chunk from behind has been stored here.
    """

    def __init__(
        self, remote: Remote, limit_bytes: int, timeout_s: float, on_kept: Callable[[Any, Chunk, int], None]
    ) -> None:
        self.remote, self._timeout_s, self._on_kept = remote, timeout_s, on_kept
        self.buffers = Buffers(limit_bytes)
        self.counts = Counts()  # hit, loaded, corrupt, kept, stored, bytes_read, bytes_written
        self.failed = Counts()  # loads, by cause
        self.dropped = Counts()  # stores, by cause
        self.fetchers = ThreadPoolExecutor(FETCH_THREADS, "kvtier-fetch")
        self._keepers = ThreadPoolExecutor(KEEP_THREADS, "kvtier-keep")

    # -- lookup and load

    def look(self, keys: Sequence[Any], found: Found) -> list[bool]:
        """Which of the objects that are not here are there."""
        there = [False] * len(keys)
        missing = [i for i, chunk in enumerate(found.chunks) if chunk is not None and not found.here[i]]
        future = self.remote.lookup([_name(keys[i], found.chunks[i]) for i in missing]) if missing else None
        if future is None:
            return there
        try:
            bits = future.result(self._timeout_s)
        except FutureTimeoutError:
            self.remote.suspect(f"a lookup was not answered within {self._timeout_s:g} s")
            return there
        for i, is_there in zip(missing, bits, strict=False):
            there[i] = is_there
        self.counts.add("hit", sum(there))
        return there

    def fetch(self, key: Any, chunk: Chunk, obj: Any, lease: Lease) -> bool:
        """Load one object's bytes into `obj`. Blocks within a bound that its size sets."""
        into = bytes_of(obj)
        wait_s = self._timeout_s + len(into) / SLOWEST_BYTES_PER_S
        buffer = self.buffers.take(len(into) + SEAL_BYTES, wait_s)
        if buffer is None:
            self.failed.add("staging full")
            return False
        future = self.remote.load(_name(key, chunk), buffer.obj)
        if future is None:
            self.buffers.give(buffer)
            self.failed.add("down")
            return False
        try:
            loaded = future.result(wait_s)
        except FutureTimeoutError:
            future.add_done_callback(lambda _: self.buffers.give(buffer))
            self.remote.suspect(f"a load was not finished within {wait_s:g} s")
            self.failed.add("time-out")
            return False
        if not loaded or lease.over:
            self.buffers.give(buffer)
            self.failed.add("too late" if loaded else "absent")
            return False
        found = bytes(buffer.view[-SEAL_BYTES:])
        into[:] = buffer.view[:-SEAL_BYTES]
        # What is served is what is verified: a client that was given up may still write to its buffers.
        if found == seal_of(into, chunk.name, chunk.space.store.namespace.raw_digest):
            self.counts.add("loaded")
            self.counts.add("bytes_read", len(into))
            self._keep(key, chunk, buffer)
            return True
        self.buffers.give(buffer)
        self.failed.add("corrupt")
        self.counts.add("corrupt")
        logger.warning("lmcache_nvme_backend: a chunk of the store behind (%s) is damaged", self.remote.name)
        return False

    def _keep(self, key: Any, chunk: Chunk, buffer: Buffer) -> None:
        def run() -> None:
            try:
                self._store_here(key, chunk, buffer.view)
            except Exception:
                logger.exception("lmcache_nvme_backend: a chunk from behind could not be kept")
            finally:
                self.buffers.give(buffer)

        try:
            self._keepers.submit(run)
        except RuntimeError:  # closing
            self.buffers.give(buffer)

    def _store_here(self, key: Any, chunk: Chunk, sealed: memoryview) -> None:
        space, payload = chunk.space, sealed[:-SEAL_BYTES]
        depth, parent = space.book.place(chunk.name)
        result = space.store.refusal(chunk.name, len(payload))
        if result is None:
            result = space.store.put(chunk.name, payload, depth=depth, parent=parent)
        if result is PutResult.STORED:
            if not is_whole(sealed, chunk.name, space.store.namespace.raw_digest):
                space.store.remove(chunk.name)  # as above: nobody knows what has been written
                return
            self.counts.add("kept")
            self._on_kept(key, chunk, len(payload))
        elif not result.kept:
            space.dropped.add(result.value)

    # -- store

    def offer(self, new: Sequence[tuple[Any, Chunk, Any]], lease: Lease) -> None:
        """Send copies of these objects there; what cannot be sent is counted and forgotten."""
        deadline = time.monotonic() + OFFER_WAIT_S
        for key, chunk, obj in new:
            try:
                why = self._send(key, chunk, bytes_of(obj), lease, deadline)
            except Exception:
                logger.exception("lmcache_nvme_backend: a chunk could not be sent to the store behind")
                why = "error"
            if why:
                self.dropped.add(why)

    def _send(self, key: Any, chunk: Chunk, payload: memoryview, lease: Lease, deadline: float) -> str:
        """Why it was not sent, or nothing."""
        if not self.remote.up:
            return "down"
        buffer = self.buffers.take(len(payload) + SEAL_BYTES, max(0.0, deadline - time.monotonic()))
        if buffer is None:
            return "staging full"
        buffer.view[:-SEAL_BYTES] = payload
        buffer.view[-SEAL_BYTES:] = seal_of(payload, chunk.name, chunk.space.store.namespace.raw_digest)
        if lease.over:
            self.buffers.give(buffer)
            return "too late"
        future = self.remote.store(_name(key, chunk), buffer.obj)
        if future is None:
            self.buffers.give(buffer)
            return "down"
        future.add_done_callback(lambda done: self._offered(done, buffer))
        return ""

    def _offered(self, done: Future[bool], buffer: Buffer) -> None:
        nbytes = buffer.nbytes - SEAL_BYTES
        self.buffers.give(buffer)
        if done.result():
            self.counts.add("stored")
            self.counts.add("bytes_written", nbytes)
        else:
            self.dropped.add("error")
            self.remote.suspect("a store failed")

    # -- end

    def close(self) -> None:
        """Give up what waits, finish what runs, leave the store behind."""
        self.buffers.close()
        self.fetchers.shutdown(wait=False, cancel_futures=True)
        self.remote.close()
        for pool in (self.fetchers, self._keepers):
            pool.shutdown(wait=True, cancel_futures=True)


def _name(key: Any, chunk: Chunk | None) -> Any:
    """The object's name there: of the chunk, in its namespace, so that other weights have other names, and hosts with
    other paths for the same weights the same."""
    assert chunk is not None
    namespace = chunk.space.store.namespace.digest
    return ObjectKey(chunk.name, f"kvtier-{namespace}", key.kv_rank, key.object_group_id, key.cache_salt)
