"""The storage plugin for LMCache in-process (``LMCacheConnectorV1``): its own allocator, so no CPU pool is needed.

Called by LMCache's worker thread (store, retrieve), its lookup server's thread (contains, pin, unpin) and its event
loop (the async variants). Nothing here raises into them: a chunk that cannot be loaded is ``None``, one that cannot be
stored is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface

from lmcache_nvme_backend.doors import lmcache_compat, lmcache_open, refusals, start
from lmcache_nvme_backend.doors.chunk_names import ChunkNames
from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.host import current_vllm_config, stream_fence
from lmcache_nvme_backend.doors.lmcache_load import LOAD_WAIT_S, ChunkLoader
from lmcache_nvme_backend.doors.lmcache_memory import RingAllocator, size_of
from lmcache_nvme_backend.doors.lmcache_store import ChunkSaver
from lmcache_nvme_backend.doors.lmcache_values import exported_values
from lmcache_nvme_backend.doors.pins import PinLedger
from lmcache_nvme_backend.doors.requests import current_call
from lmcache_nvme_backend.doors.self_test import check_round_trip
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.metrics import MetricsExporter
from lmcache_nvme_backend.settings import parse_settings
from lmcache_nvme_backend.store import ChunkKey

# LMCache gives a backend 15 s in all to close; writes in flight get this much of it, then they are abandoned.
CLOSE_WAIT_S = 5.0

# Connectors that walk the objects one after the other, and have finished with one when they ask for the next one's
# bytes (stores synchronise after each, loads are fenced). Read in LMCache 0.5.4 to 0.5.6.
STREAMING_CONNECTORS = ("CpuBlockConnector", "VLLMPagedMemGPUConnectorV2", "VLLMPagedMemXPUConnectorV2")

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class NvmeBackend(AllocatorBackendInterface):
    """Chunks on NVMe behind LMCache's allocator interface.

    Beside a ``LocalCPUBackend`` it allocates from that one, since LMCache keeps what is loaded in that cache.

    Raises (constructor):
        ConfigError: whatever a person can put right. LMCache logs and swallows it; the adaptation of its manager raises
        it again where ``nvme.on_init_error`` is ``fail``.
    """

    def __init__(
        self,
        config: Any = None,
        dst_device: str = "cpu",
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device=dst_device)
        self.config, self.metadata, self.loop = config, metadata, loop
        self._cpu = local_cpu_backend
        self._opened: list[Callable[[], None]] = []
        try:
            self._open()
        except Exception as e:
            for undo in reversed(self._opened):
                undo()
            start.record_failure(e, self.loop)
            raise

    def __str__(self) -> str:
        return "NvmeBackend"

    # -- start and end ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        vllm_config = current_vllm_config()
        lmcache_compat.apply_all(with_vllm=vllm_config is not None)
        s = self.settings = parse_settings(self.config.extra_config)
        refusals.check_lmcache(lambda field: getattr(self.config, field, None))
        if vllm_config is not None:
            lmcache_open.check_engine(self.config, vllm_config)
        self._names = ChunkNames(scoped=vllm_config is not None)
        self._chunk_tokens = self.metadata.chunk_size
        self._allocator: RingAllocator | None = None
        if self._cpu is None:
            chunk_bytes = size_of(self.metadata.get_shapes(self._chunk_tokens), self.metadata.get_dtypes())
            self._allocator = lmcache_open.open_ring(s, chunk_bytes, self.dst_device, self._opened)
        self.store = lmcache_open.open_store(s, self.config, self.metadata, vllm_config, self._opened)
        self.loader = ChunkLoader(
            self.store, self._allocator, self._cpu, self.metadata, s.io_threads, stream_fence(self.dst_device)
        )
        self.saver = ChunkSaver(
            self.store, self._allocator, s.io_threads, s.store_wait_ms / 1000, self._chunk_tokens, self._names.of
        )
        self._pins = PinLedger(self.store.unpin, float(getattr(self.config, "pin_timeout_sec", 300)))
        self._lookups = Counts()
        self._streams = False
        self._closed = False
        self.withdrawn = False
        self._metrics = MetricsExporter(self._values, self.metadata.worker_id)
        usage = self.store.usage()
        logger.info(
            "lmcache_nvme_backend: rank %d serves from %s: %d chunks in this namespace, %.2f of %.2f GiB used, "
            "staging %d slots in %d MiB",
            self.metadata.worker_id, self.store.directory, usage.namespace_chunks, usage.used_bytes / 2**30,
            usage.quota_bytes / 2**30, self._slots, self.settings.staging_mib,
        )  # fmt: skip

    def attach(self, engine: Any) -> None:
        """LMCache's engine is complete: decide whether chunks stream through the ring. Called by the adaptation.

        Streaming relies on a connector that copies one object after the other and has finished with each when it asks
        for the next; elsewhere, and where LMCache keeps what is loaded, whole chunks are held in slots.
        """
        connector = type(engine.gpu_connector).__name__
        reasons = [
            (self._cpu is not None, "LMCache's CPU cache keeps what is loaded"),
            (connector not in STREAMING_CONNECTORS, f"the connector {connector} may copy several chunks at once"),
            (len(engine.storage_manager.storage_backends) > 1, "other storage backends take the same objects"),
            (bool(engine.save_only_first_rank), "chunks are broadcast between ranks"),
            (bool(self.config.save_unfull_chunk), "partial chunks have a size that is known only after reading"),
        ]
        why_not = next((reason for applies, reason in reasons if applies), None)
        self._streams = why_not is None
        if why_not is not None:
            logger.info("lmcache_nvme_backend: chunks are held whole in staging, not streamed: %s", why_not)

    def self_test(self, connector: Any, kv_caches: Sequence[Any], cache_config: Any) -> Exception | None:
        """Carry a chunk through the tier before the first request; why the tier must not serve, if so.

        Args:
            connector: LMCache's connector, as its engine uses it.
            kv_caches: every layer's paged KV, still without a request.
            cache_config: vLLM's.
        """
        if self.settings.self_test == "off":
            return None
        try:
            check_round_trip(connector, self, kv_caches, cache_config.num_gpu_blocks, cache_config.block_size)
        except ConfigError as e:
            return e
        except Exception as e:
            logger.exception("lmcache_nvme_backend: the self-test could not finish")
            return e
        return None

    def withdraw(self) -> None:
        """Serve nothing and store nothing from now on; ``kvtier_degraded`` shows it."""
        self.withdrawn = True
        self.store.close()

    @property
    def _slots(self) -> int:
        return self._allocator.ring.slots if self._allocator is not None else 0

    def close(self) -> None:
        """Finish writes in flight within ``CLOSE_WAIT_S``, abandon the rest, give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.saver.close(CLOSE_WAIT_S)
        self.loader.close()
        self.store.close()
        self._metrics.close()
        if self._allocator is not None:
            self._allocator.close()

    # -- allocation ---------------------------------------------------------------------------------------------------

    def initialize_allocator(self, config: Any, metadata: Any) -> Any:
        return self.get_memory_allocator()

    def get_memory_allocator(self) -> Any:
        return self._allocator if self._allocator is not None else self._cpu.get_memory_allocator()

    def get_allocator_backend(self) -> Any:
        return self if self._allocator is not None else self._cpu

    def calculate_chunk_budget(self) -> int:
        return self._slots if self._allocator is not None else int(self._cpu.calculate_chunk_budget())

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> Any | None:
        """Memory for a chunk, or ``None``. Streamed within a store that streams; else a slot, for which a store
        (``busy_loop`` False) waits within the step's bound, a load until others give theirs back."""
        if self._allocator is None:
            obj = self._cpu.allocate(shapes, dtypes, fmt, eviction, busy_loop)
        elif (obj := self.saver.target(shapes, dtypes, fmt)) is None:
            with self._slot_wait(busy_loop) as timeout_s:
                obj = self._allocator.allocate(shapes, dtypes, fmt, timeout_s=timeout_s)
        if obj is None and (call := current_call()) is not None:
            call.ran_out = True
        return obj

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> list[Any] | None:
        if self._allocator is None:
            objs: list[Any] | None = self._cpu.batched_allocate(shapes, dtypes, batch_size, fmt, eviction, busy_loop)
            return objs
        with self._slot_wait(busy_loop) as timeout_s:
            return self._allocator.batched_allocate(shapes, dtypes, batch_size, fmt, timeout_s=timeout_s)

    @contextmanager
    def _slot_wait(self, for_load: bool) -> Iterator[float]:
        if for_load:
            yield LOAD_WAIT_S
            return
        with self.saver.waiting() as timeout_s:
            yield timeout_s

    @property
    def load_has_failed(self) -> bool:
        """Whether a load failed since the last step was saved."""
        return self.saver.step_failed

    def load_failed(self, request_id: str | None, hit_tokens: int) -> None:
        """A retrieve of this step got less than the ``hit_tokens`` that were to be had of the prompt."""
        self.saver.load_failed(request_id, hit_tokens // self._chunk_tokens)

    @contextmanager
    def saving_step(self, failed_elsewhere: Sequence[tuple[str, int]] = ()) -> Iterator[None]:
        """Around the stores of one engine step, which may wait ``nvme.store_wait_ms`` in all.

        ``failed_elsewhere``: requests, and the tokens of their hits, that loaded in a step in which some rank failed.
        """
        for request_id, hit_tokens in failed_elsewhere:
            self.load_failed(request_id, hit_tokens)
        self.saver.start_step()
        try:
            yield
        finally:
            self.saver.end_step()

    # -- lookup -------------------------------------------------------------------------------------------------------

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many leading chunks can be loaded. Where they are not streamed, never more than the ring holds at once.

        A lookup pins; what asks without pinning repeats a lookup's question and is not counted again.
        """
        digests = self._names.of_prefix(keys)
        found = self._match(digests, pin, again=not pin)
        if pin:
            self._pins.taken(digests[:found])
            self._looked_up(digests, found, len(keys))
        return found

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        # LMCache's async loading never unpins by key: what it loads next is held by the memory objects instead.
        digests = self._names.of_prefix(keys)
        found = self._match(digests, pin=False, again=False)
        self._looked_up(digests, found, len(keys))
        return found

    def _match(self, digests: list[ChunkKey], pin: bool, again: bool) -> int:
        held_whole = self._allocator is not None and not self._streams
        return self.store.match(digests[: self._slots] if held_whole else digests, pin=pin, again=again)

    def _looked_up(self, digests: list[ChunkKey], found: int, asked: int) -> None:
        self.saver.book.link(digests, found)
        self._lookups.add("hit", found)
        self._lookups.add("missed", asked - found)

    def exists_in_put_tasks(self, key: Any) -> bool:
        return self.saver.writes(self._names.of(key))

    def pin(self, key: Any) -> bool:
        digest = self._names.of(key)
        if digest is None or not self.store.pin(digest):
            return False
        self._pins.taken([digest])
        return True

    def unpin(self, key: Any) -> bool:
        digest = self._names.of(key)
        return digest is not None and self._pins.given_back(digest)

    def touch_cache(self) -> None:
        """Nothing to do: lookups refresh recency themselves."""

    # -- store --------------------------------------------------------------------------------------------------------

    def storing(self, request_id: str | None, skipped_tokens: int, total_tokens: int) -> Any:
        """A context around one ``LMCacheEngine.store`` of this thread; it gives False where nothing is to be stored."""
        partial = bool(self.config.save_unfull_chunk) and total_tokens % self._chunk_tokens > 0
        first, last = skipped_tokens // self._chunk_tokens, total_tokens // self._chunk_tokens + partial
        return self.saver.storing(request_id, first, last, self._streams)

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[Any]] | None:
        """Write behind: the objects are held until their chunk is on disk, dropped or there already."""
        return self.saver.put(keys, objs, on_complete_callback) or None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        futures = self.saver.put(keys, objs, on_complete_callback)
        await asyncio.gather(*(asyncio.wrap_future(f) for f in futures))

    def wait_for_writes(self, timeout_s: float) -> bool:
        """Wait until no write is in flight; False where some still are after ``timeout_s`` seconds."""
        return self.saver.wait_for_writes(timeout_s)

    # -- load ---------------------------------------------------------------------------------------------------------

    def retrieving(self, skipped_tokens: int) -> Any:
        """A context around one ``LMCacheEngine.retrieve`` of this thread."""
        return self.loader.retrieving(skipped_tokens // self._chunk_tokens)

    def get_blocking(self, key: Any) -> Any | None:
        return self.loader.load(self._names.of_prefix([key]), 1)[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any | None]:
        """The chunks in order; from the first that cannot be had on, ``None``: later ones are of no use.

        Streamed within a retrieve that can cut its answer when a later chunk turns out bad; else loaded whole.
        """
        digests = self._names.of_prefix(keys)
        call = self.loader.current_call()
        if self._streams and call is not None:
            objs: list[Any | None] = [*self.loader.stream(digests, call.first)]
            return objs + [None] * (len(keys) - len(objs))
        return self.loader.load(digests, len(keys))

    def get_non_blocking(self, key: Any, location: str | None = None) -> Future[Any] | None:
        """A future of the chunk's object (``None`` in it where the load fails); ``None`` where there is no slot now."""
        loads = self.loader.start(self._names.of_prefix([key]), 0.0)
        return loads[0] if loads else None

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """The leading chunks that could be loaded: fewer where they are held whole and the ring is full."""
        digests = self._names.of_prefix(keys)
        if self._streams:
            return [*self.loader.stream(digests, 0)]
        loads = await asyncio.to_thread(self.loader.start, digests, 0.0)
        return await asyncio.to_thread(self.loader.collect, loads)

    # -- removal and numbers ------------------------------------------------------------------------------------------

    def remove(self, key: Any, force: bool = True) -> bool:
        digest = self._names.of(key)
        return digest is not None and self.store.remove(digest)

    def clear(self) -> int:
        """Remove this namespace's chunks. Returns tokens, as LMCache counts them."""
        return int(self.store.clear() * self._chunk_tokens)

    def _values(self) -> dict[str, Any]:
        return exported_values(self)
