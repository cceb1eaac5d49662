"""From NVMe to LMCache's memory objects: whole chunks at once, or streamed through the ring.

Streaming hands out objects at once and reads while LMCache walks them, so a hit of any length needs a few slots. It is
used where LMCache's connector walks the objects one after the other and nothing else wants to keep them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from lmcache.v1.memory_management import MemoryFormat

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.lmcache_memory import RingAllocator, SlotMemoryObj, StreamedMemoryObj, size_of
from lmcache_nvme_backend.staging import ReadStream
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit

# A load waits this long for slots that writes still hold; every write is bounded by the drive, so this is never reached
# by a drive that works.
LOAD_WAIT_S = 10.0

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class RetrieveCall:
    """One ``LMCacheEngine.retrieve`` of this thread: which streams it consumed, and where the first one failed."""

    def __init__(self, first: int) -> None:
        self.first = first  # of the prompt's chunks, the first one that is asked for
        self.streams: dict[int, tuple[ReadStream, int]] = {}

    def consumes(self, stream: ReadStream, first: int) -> None:
        """``stream``'s chunk 0 is chunk ``first`` of the prompt."""
        self.streams[id(stream)] = (stream, first)

    def failed_from(self) -> int | None:
        """The first chunk of the prompt whose bytes are not to be trusted."""
        failed = [first + stream.failed for stream, first in self.streams.values() if stream.failed is not None]
        return min(failed, default=None)


class ChunkLoader:
    """Loads chunks of one namespace into memory objects. Never raises; what cannot be loaded is ``None``."""

    def __init__(
        self,
        store: ChunkStore,
        allocator: RingAllocator | None,
        cpu_backend: Any | None,
        metadata: Any,
        io_threads: int,
        fence: Callable[[], Any],
    ) -> None:
        self._store, self._allocator, self._cpu, self._metadata = store, allocator, cpu_backend, metadata
        self._pool = ThreadPoolExecutor(io_threads, "kvtier-read")
        # One read a thread that runs, and three that can start while whoever consumes them is held up: on a busy
        # machine a thread waits tens of milliseconds for a core.
        self._ahead = 4 * io_threads
        self._fence = fence
        self._call = threading.local()
        self._chunk_tokens = metadata.chunk_size
        self.chunk_format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self.failed = Counts()
        self.retrieve_s = 0.0  # time that retrieves took on the engine's thread, since the start

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def sizeof(self, tokens: int) -> int:
        return size_of(self._metadata.get_shapes(tokens), self._metadata.get_dtypes())

    def current_call(self) -> RetrieveCall | None:
        """The retrieve that this thread is in."""
        call: RetrieveCall | None = getattr(self._call, "current", None)
        return call

    @contextmanager
    def retrieving(self, first: int) -> Iterator[RetrieveCall]:
        """Around one ``LMCacheEngine.retrieve`` of this thread, for the prompt's chunks from ``first`` on."""
        call = self._call.current = RetrieveCall(first)
        began = time.perf_counter()
        try:
            yield call
        finally:
            self._call.current = None
            self.retrieve_s += time.perf_counter() - began

    # -- streamed -----------------------------------------------------------------------------------------------------

    def stream(self, digests: Sequence[ChunkKey], first: int) -> list[StreamedMemoryObj]:
        """Objects for the leading chunks that are there, being read from now on.

        Each holds a pin on its chunk and drops it with its last reference. ``first`` is the place of ``digests[0]`` in
        the prompt, in chunks.
        """
        assert self._allocator is not None
        if not self._allocator.ring.fit(self.sizeof(self._chunk_tokens)):
            self.failed.add("larger than staging")
            return []
        there = []
        for digest in digests:
            if not self._store.pin(digest):
                self.failed.add("absent")
                break
            there.append(digest)
        stream = ReadStream(
            self._allocator.ring, self._pool, [self._reader(digest) for digest in there], self._ahead, self._fence
        )
        shapes, dtypes = self._metadata.get_shapes(self._chunk_tokens), self._metadata.get_dtypes()
        objs: list[StreamedMemoryObj] = []
        for i, digest in enumerate(there):
            take, let_go = self._consumer(stream, i, first), self._releaser(stream, i, digest)
            obj = self._allocator.streamed(shapes, dtypes, self.chunk_format, take, let_go)
            if obj is None:  # the ring was divided anew for larger chunks meanwhile
                for rest in range(i, len(there)):
                    self._releaser(stream, rest, there[rest])()
                break
            objs.append(obj)
        return objs

    def _reader(self, digest: ChunkKey) -> Callable[[memoryview], bool]:
        expected = self.sizeof(self._chunk_tokens)

        def read(view: memoryview) -> bool:
            result = self._store.get(digest, view)
            if isinstance(result, Hit) and result.nbytes == expected:
                return True
            self.failed.add("other size" if isinstance(result, Hit) else result.cause.value)
            return False

        return read

    def _consumer(self, stream: ReadStream, i: int, first: int) -> Callable[[], Any]:
        def take() -> Any:
            if (call := self.current_call()) is not None:
                call.consumes(stream, first)
            return stream.take(i)

        return take

    def _releaser(self, stream: ReadStream, i: int, digest: ChunkKey) -> Callable[[], None]:
        def let_go() -> None:
            stream.release(i)
            self._store.unpin(digest)

        return let_go

    # -- whole --------------------------------------------------------------------------------------------------------

    def load(self, digests: Sequence[ChunkKey], wanted: int) -> list[Any | None]:
        """Load in parallel; from the first chunk that fails on the answer is ``None``, up to ``wanted`` entries."""
        objs = self.collect(self.start(digests, LOAD_WAIT_S))
        return objs + [None] * (wanted - len(objs))

    def start(self, digests: Sequence[ChunkKey], slot_wait_s: float) -> list[Future[Any | None]]:
        """Begin to load as many leading chunks as there is memory for."""
        loads: list[Future[Any | None]] = []
        shapes, dtypes = self._metadata.get_shapes(self._chunk_tokens), self._metadata.get_dtypes()
        for digest in digests:
            if self._cpu is not None:
                obj = self._cpu.allocate(shapes, dtypes, self.chunk_format, busy_loop=slot_wait_s > 0)
            else:
                assert self._allocator is not None
                obj = self._allocator.allocate(shapes, dtypes, self.chunk_format, timeout_s=slot_wait_s)
            if obj is None:
                self.failed.add("staging full")
                break
            try:
                loads.append(self._pool.submit(self._read, digest, obj))
            except RuntimeError:  # closed meanwhile
                obj.ref_count_down()
                break
        return loads

    def collect(self, loads: list[Future[Any | None]]) -> list[Any]:
        """Wait for loads and keep those before the first that failed."""
        wait(loads)
        objs = [load.result() if load.exception() is None else None for load in loads]
        good = next((i for i, obj in enumerate(objs) if obj is None), len(objs))
        for obj in objs[good:]:
            if obj is not None:
                obj.ref_count_down()
        return objs[:good]

    def _read(self, digest: ChunkKey, obj: Any) -> Any | None:
        """Read one chunk into ``obj``; ``None`` (and the object given back) where that fails."""
        try:
            view = obj.payload() if isinstance(obj, SlotMemoryObj) else obj.byte_array
            result = self._store.get(digest, view)
            if not isinstance(result, Hit):
                self.failed.add(result.cause.value)
            elif result.nbytes == obj.get_size():
                return obj
            elif 0 < result.tokens < self._chunk_tokens and result.nbytes == self.sizeof(result.tokens):
                return self._narrowed(obj, result.tokens)
            else:
                self.failed.add("other size")
        except Exception:
            self.failed.add("internal error")
            logger.exception("lmcache_nvme_backend: loading a chunk failed")
        obj.ref_count_down()
        return None

    def _narrowed(self, obj: Any, tokens: int) -> Any | None:
        """A partial chunk's object: the same slot with fewer tokens, or a smaller one of LMCache's CPU pool."""
        shapes, dtypes = self._metadata.get_shapes(tokens), self._metadata.get_dtypes()
        if isinstance(obj, SlotMemoryObj):
            return obj.narrow(shapes, dtypes)
        smaller = self._cpu.allocate(shapes, dtypes, obj.meta.fmt, busy_loop=False)  # type: ignore[union-attr]
        if smaller is not None:
            smaller.raw_data[: smaller.get_size()].copy_(obj.raw_data[: smaller.get_size()])
        obj.ref_count_down()
        return smaller
