"""The storage plugin for LMCache in-process (``LMCacheConnectorV1``): its own allocator, so no CPU pool is needed.

Called by LMCache's worker thread (store, retrieve), its lookup server's thread (contains, pin, unpin) and its event
loop (the async variants). Nothing here raises into them: a chunk that cannot be loaded is ``None``, one that cannot be
stored is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface

from lmcache_nvme_backend.doors import lmcache_compat, refusals, scope, start, vllm_plugin
from lmcache_nvme_backend.doors.identity import namespace_facts, random_seed_warning
from lmcache_nvme_backend.doors.lmcache_memory import RingAllocator, SlotMemoryObj, device_memory
from lmcache_nvme_backend.doors.pins import PinLedger
from lmcache_nvme_backend.doors.requests import RequestBook, StoreCall, StoreRequest
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.metrics import MetricsExporter
from lmcache_nvme_backend.settings import parse_settings
from lmcache_nvme_backend.staging import StagingRing
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit, Namespace, PutResult, StoreSettings, digest_fields

# A load waits this long for slots that writes still hold; every write is bounded by the drive, so this is never reached
# by a drive that works.
LOAD_WAIT_S = 10.0
# LMCache gives a backend 15 s in all to close; writes in flight get this much of it, then they are abandoned.
CLOSE_WAIT_S = 5.0

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class NvmeBackend(AllocatorBackendInterface):  # type: ignore[misc]
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
            start.record_failure(e)
            raise

    def __str__(self) -> str:
        return "NvmeBackend"

    # -- start and end ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        vllm_config = _vllm_config()
        lmcache_compat.apply_all(with_vllm=vllm_config is not None)
        self.settings = parse_settings(self.config.extra_config)
        refusals.check_lmcache(lambda field: getattr(self.config, field, None))
        if vllm_config is not None:
            self._check_engine(vllm_config)
        self._scoped = vllm_config is not None
        self._chunk_tokens = self.metadata.chunk_size
        chunk_bytes = self._sizeof(self._chunk_tokens)
        if self._cpu is None:
            self._open_ring(chunk_bytes)
        self._open_store(vllm_config)
        self._read_pool = ThreadPoolExecutor(self.settings.io_threads, "kvtier-read")
        self._write_pool = ThreadPoolExecutor(self.settings.io_threads, "kvtier-write")
        self._pins = PinLedger(self.store.unpin, float(getattr(self.config, "pin_timeout_sec", 300)))
        self._book = RequestBook()
        self._call = threading.local()
        self._waited_s = 0.0
        self._wait_total_s = 0.0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight: set[ChunkKey] = set()
        self._lookups = {"hit": 0, "missed": 0}
        self._dropped: dict[str, int] = {}
        self._load_failed: dict[str, int] = {}
        self._unscoped_said = False
        self._closed = False
        self._metrics = MetricsExporter(self._values, self.metadata.worker_id)
        usage = self.store.usage()
        logger.info(
            "lmcache_nvme_backend: rank %d serves from %s: %d chunks in this namespace, %.2f of %.2f GiB used, "
            "staging %d slots of %.1f MiB",
            self.metadata.worker_id, self.store.directory, usage.namespace_chunks, usage.used_bytes / 2**30,
            usage.quota_bytes / 2**30, self._slots, chunk_bytes / 2**20,
        )  # fmt: skip

    def _check_engine(self, vllm_config: Any) -> None:
        refusals.check_vllm(vllm_config)
        if not vllm_plugin.registered():
            raise ConfigError(
                "VLLM_PLUGINS", "a list without lmcache_nvme_backend", "a list with it, or the variable unset",
                "vLLM's scheduler process must load the plugin, or chunks would be shared between LoRA adapters and "
                "between cache_salts.",
            )  # fmt: skip
        if str(vllm_config.device_config.device_type) == "cpu":
            from lmcache_nvme_backend.doors.cpu_connector import check_cpu_layout

            check_cpu_layout(self.config, vllm_config)

    def _open_ring(self, chunk_bytes: int) -> None:
        memory = device_memory(self.settings.staging_bytes)
        self._opened.append(memory.close)
        ring = StagingRing(memory, chunk_bytes)
        if ring.slots < 2:
            raise ConfigError(
                "nvme.staging_mib", f"{self.settings.staging_mib} MiB with chunks of {chunk_bytes / 2**20:.1f} MiB",
                "at least two chunks", f"Set it to {-(-2 * ring.slot_bytes // 2**20)} or more.",
            )  # fmt: skip
        if self.dst_device != "cpu" and not memory.pinned:
            raise ConfigError(
                "nvme.staging_mib", f"{self.settings.staging_mib} MiB that {self.dst_device} cannot pin",
                "host memory that can be registered with the device",
                "Lower it, or raise the locked-memory limit (ulimit -l).",
            )  # fmt: skip
        self._allocator = RingAllocator(ring)
        self._opened.append(self._allocator.close)

    def _open_store(self, vllm_config: Any) -> None:
        s = self.settings
        namespace = Namespace(namespace_facts(s, self.config, self.metadata, vllm_config))
        self.store = ChunkStore.open(
            Path(s.path),
            namespace,
            StoreSettings(
                quota_bytes=s.quota_bytes,
                direct_io=s.direct_io,
                fsync=s.fsync,
                codec=s.codec,
                lock_wait_s=s.lock_wait_s,
            ),
        )
        self._opened.append(self.store.close)
        warnings = list(self.store.warnings)
        if seed := random_seed_warning(self.config):
            warnings.append(seed)
        for warning in warnings:
            logger.warning("lmcache_nvme_backend: %s", warning)

    @property
    def _slots(self) -> int:
        return self._allocator.ring.slots if self._cpu is None else 0

    def close(self) -> None:
        """Finish writes in flight within ``CLOSE_WAIT_S``, abandon the rest, give everything back. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._write_pool.shutdown(wait=False, cancel_futures=False)
        self.wait_for_writes(CLOSE_WAIT_S)
        self._write_pool.shutdown(wait=False, cancel_futures=True)
        self._read_pool.shutdown(wait=False, cancel_futures=True)
        self.store.close()
        self._metrics.close()
        if self._cpu is None:
            self._allocator.close()

    def wait_for_writes(self, timeout_s: float) -> bool:
        """Wait until no write is in flight; False where some still are after ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._in_flight, timeout_s)

    # -- allocation ---------------------------------------------------------------------------------------------------

    def initialize_allocator(self, config: Any, metadata: Any) -> Any:
        return self.get_memory_allocator()

    def get_memory_allocator(self) -> Any:
        return self._allocator if self._cpu is None else self._cpu.get_memory_allocator()

    def get_allocator_backend(self) -> Any:
        return self if self._cpu is None else self._cpu

    def calculate_chunk_budget(self) -> int:
        return self._slots if self._cpu is None else int(self._cpu.calculate_chunk_budget())

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> Any | None:
        """A slot, or ``None``. A store (``busy_loop`` False) waits within the step's bound, a load for slots."""
        if self._cpu is not None:
            obj = self._cpu.allocate(shapes, dtypes, fmt, eviction, busy_loop)
        else:
            with self._waiting(busy_loop) as timeout_s:
                obj = self._allocator.allocate(shapes, dtypes, fmt, timeout_s=timeout_s)
        call: StoreCall | None = getattr(self._call, "current", None)
        if obj is None and call is not None:
            call.ran_out = True
        return obj

    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> list[Any] | None:
        if self._cpu is not None:
            objs: list[Any] | None = self._cpu.batched_allocate(shapes, dtypes, batch_size, fmt, eviction, busy_loop)
            return objs
        with self._waiting(busy_loop) as timeout_s:
            return self._allocator.batched_allocate(shapes, dtypes, batch_size, fmt, timeout_s=timeout_s)

    @contextmanager
    def _waiting(self, for_load: bool) -> Iterator[float]:
        """How long an allocation may wait now; the time it takes counts against the step."""
        if for_load:
            yield LOAD_WAIT_S
            return
        begin = time.monotonic()
        yield max(0.0, self.settings.store_wait_ms / 1000 - self._waited_s)
        spent = time.monotonic() - begin
        self._waited_s += spent
        self._wait_total_s += spent

    def start_step(self) -> None:
        """A new engine step: its stores may wait ``nvme.store_wait_ms`` in all."""
        self._waited_s = 0.0

    # -- lookup -------------------------------------------------------------------------------------------------------

    def _digest(self, key: Any) -> ChunkKey | None:
        """The chunk's name, or ``None`` for a key whose request did not pass a marked scheduler."""
        tags = sorted((str(name), str(value)) for name, value in key.tags or ())
        if self._scoped and not any(name == scope.TAG for name, _ in tags):
            if not self._unscoped_said:
                self._unscoped_said = True
                logger.error(
                    "lmcache_nvme_backend: a request came without its LoRA and cache_salt mark and is neither stored "
                    "nor served: this vLLM or LMCache does not pass it on (kvtier_chunks_dropped_total, unmarked)."
                )
            return None
        fields: list[str | int] = [key.world_size, key.worker_id, key.chunk_hash, str(key.dtype)]
        for tag in tags:
            fields.extend(tag)
        return digest_fields(*fields)

    def _digests(self, keys: Sequence[Any]) -> list[ChunkKey]:
        digests = []
        for key in keys:
            digest = self._digest(key)
            if digest is None:
                break
            digests.append(digest)
        return digests

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many leading chunks can be loaded. Never more than the ring holds at once.

        A lookup pins; what asks without pinning repeats a lookup's question and is not counted again.
        """
        digests = self._digests(keys)
        found = self.store.match(digests[: self._slots] if self._cpu is None else digests, pin=pin)
        if pin:
            self._pins.taken(digests[:found])
            self._looked_up(digests, found, len(keys))
        return found

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        # LMCache's async loading never unpins by key: what it loads next is held by the memory objects instead.
        found = self.batched_contains(keys, pin=False)
        self._looked_up(self._digests(keys), found, len(keys))
        return found

    def _looked_up(self, digests: list[ChunkKey], found: int, asked: int) -> None:
        self._book.link(digests, found)
        with self._lock:
            self._lookups["hit"] += found
            self._lookups["missed"] += asked - found

    def exists_in_put_tasks(self, key: Any) -> bool:
        return self._digest(key) in self._in_flight

    def pin(self, key: Any) -> bool:
        digest = self._digest(key)
        if digest is None or not self.store.pin(digest):
            return False
        self._pins.taken([digest])
        return True

    def unpin(self, key: Any) -> bool:
        digest = self._digest(key)
        return digest is not None and self._pins.given_back(digest)

    def touch_cache(self) -> None:
        """Nothing to do: lookups refresh recency themselves."""

    # -- store --------------------------------------------------------------------------------------------------------

    @contextmanager
    def storing(self, request_id: str | None, skipped_tokens: int, total_tokens: int) -> Iterator[bool]:
        """Around one ``LMCacheEngine.store`` of this thread. Yields False where the prefix has lost a chunk before."""
        first = skipped_tokens // self._chunk_tokens
        partial = bool(self.config.save_unfull_chunk) and total_tokens % self._chunk_tokens > 0
        last = total_tokens // self._chunk_tokens + partial
        call = StoreCall(self._book.request(request_id), first, last)
        if not call.request.admits(first):
            self._drop("prefix lost", last - first)
            yield False
            return
        self._call.current = call
        try:
            yield True
        except BaseException:
            call.request.refuse(first + call.submitted)
            raise
        finally:
            self._call.current = None
        if call.ran_out:
            call.request.refuse(first + call.submitted)
            self._drop("staging full", (last - first) - call.submitted)

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[Any]] | None:
        """Write behind: the objects are held until their chunk is on disk, dropped or there already."""
        call: StoreCall | None = getattr(self._call, "current", None)
        request = call.request if call is not None else StoreRequest()
        first = call.first + call.submitted if call is not None else 0
        futures: list[Future[Any]] = []
        for depth, (key, obj) in enumerate(zip(keys, objs, strict=False), start=first):
            if call is not None:
                call.submitted += 1
            digest = self._digest(key)
            if digest is None:
                self._drop("unmarked", 1)
                continue
            parent = self._book.parent(digest) or request.last
            request.last = digest
            with self._lock:
                if self._closed:
                    self._drop_locked("closed", 1)
                    continue
                if digest in self._in_flight:
                    continue
                self._in_flight.add(digest)
            obj.ref_count_up()
            try:
                futures.append(
                    self._write_pool.submit(self._write, key, digest, obj, depth, parent, request, on_complete_callback)
                )
            except RuntimeError:  # the pool was shut down between the check and here
                self._written(digest, obj)
                self._drop("closed", 1)
        return futures or None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        futures = self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback) or []
        await asyncio.gather(*(asyncio.wrap_future(f) for f in futures))

    def _write(
        self,
        key: Any,
        digest: ChunkKey,
        obj: Any,
        depth: int,
        parent: ChunkKey | None,
        request: StoreRequest,
        on_complete: Callable[[Any], None] | None,
    ) -> None:
        stored = False
        try:
            if not request.admits(depth):
                self._drop("prefix lost", 1)
                return
            view = obj.payload() if isinstance(obj, SlotMemoryObj) else obj.byte_array
            view = view[: obj.get_size()]
            result = self.store.put(digest, view, depth=depth, parent=parent, tokens=int(obj.get_num_tokens()))
            stored = result.kept
            if not stored:
                request.refuse(depth)
                self._drop(result.value, 1)
            elif result is PutResult.STORED and not request.admits(depth):
                # A predecessor was lost while this one was on its way: it would only take room.
                self.store.remove(digest)
                self._drop("prefix lost", 1)
        except Exception:
            request.refuse(depth)
            self._drop("internal error", 1)
            logger.exception("lmcache_nvme_backend: storing a chunk failed")
        finally:
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

    def _drop(self, cause: str, chunks: int) -> None:
        with self._lock:
            self._drop_locked(cause, chunks)

    def _drop_locked(self, cause: str, chunks: int) -> None:
        self._dropped[cause] = self._dropped.get(cause, 0) + chunks

    # -- load ---------------------------------------------------------------------------------------------------------

    def get_blocking(self, key: Any) -> Any | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any | None]:
        """Load chunks in parallel. From the first that fails on, the answer is ``None``: later ones are of no use."""
        return self._collect(self._start_loads(keys, LOAD_WAIT_S), len(keys))

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """The leading chunks that could be loaded; fewer than asked for where the ring is full."""
        loads = await asyncio.to_thread(self._start_loads, keys, 0.0)
        await asyncio.wait([asyncio.wrap_future(f) for f in loads]) if loads else None
        return [obj for obj in self._collect(loads, len(loads)) if obj is not None]

    def _start_loads(self, keys: Sequence[Any], slot_wait_s: float) -> list[Future[Any | None]]:
        loads: list[Future[Any | None]] = []
        shapes, dtypes = self.metadata.get_shapes(self._chunk_tokens), self.metadata.get_dtypes()
        fmt = MemoryFormat.KV_MLA_FMT if self.metadata.use_mla else MemoryFormat.KV_2LTD
        for digest in self._digests(keys):
            if self._cpu is not None:
                obj = self._cpu.allocate(shapes, dtypes, fmt, busy_loop=slot_wait_s > 0)
            else:
                obj = self._allocator.allocate(shapes, dtypes, fmt, timeout_s=slot_wait_s)
            if obj is None:
                self._failed_load("staging full")
                break
            try:
                loads.append(self._read_pool.submit(self._read, digest, obj))
            except RuntimeError:  # closed meanwhile
                obj.ref_count_down()
                break
        return loads

    def _collect(self, loads: list[Future[Any | None]], wanted: int) -> list[Any | None]:
        wait(loads)
        objs = [load.result() for load in loads]
        good = next((i for i, obj in enumerate(objs) if obj is None), len(objs))
        for obj in objs[good:]:
            if obj is not None:
                obj.ref_count_down()
        return objs[:good] + [None] * (wanted - good)

    def _read(self, digest: ChunkKey, obj: Any) -> Any | None:
        """Read one chunk into ``obj``; ``None`` (and the object given back) where that fails."""
        try:
            view = obj.payload() if isinstance(obj, SlotMemoryObj) else obj.byte_array
            result = self.store.get(digest, view)
            if not isinstance(result, Hit):
                self._failed_load(result.cause.value)
            elif result.nbytes == obj.get_size():
                return obj
            elif 0 < result.tokens < self._chunk_tokens and result.nbytes == self._sizeof(result.tokens):
                return self._narrowed(obj, result.tokens)
            else:
                self._failed_load("other size")
        except Exception:
            self._failed_load("internal error")
            logger.exception("lmcache_nvme_backend: loading a chunk failed")
        obj.ref_count_down()
        return None

    def _narrowed(self, obj: Any, tokens: int) -> Any | None:
        """A partial chunk's object: the same slot with fewer tokens, or a smaller one of LMCache's CPU pool."""
        shapes, dtypes = self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        if isinstance(obj, SlotMemoryObj):
            return obj.narrow(shapes, dtypes)
        smaller = self._cpu.allocate(shapes, dtypes, obj.meta.fmt, busy_loop=False)
        if smaller is not None:
            smaller.raw_data[: smaller.get_size()].copy_(obj.raw_data[: smaller.get_size()])
        obj.ref_count_down()
        return smaller

    def _failed_load(self, cause: str) -> None:
        with self._lock:
            self._load_failed[cause] = self._load_failed.get(cause, 0) + 1

    def _sizeof(self, tokens: int) -> int:
        shapes, dtypes = self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    # -- removal and numbers ------------------------------------------------------------------------------------------

    def remove(self, key: Any, force: bool = True) -> bool:
        digest = self._digest(key)
        return digest is not None and self.store.remove(digest)

    def clear(self) -> int:
        """Remove this namespace's chunks. Returns tokens, as LMCache counts them."""
        return self.store.clear() * self._chunk_tokens

    def _values(self) -> dict[str, Any]:
        stats, usage = self.store.stats, self.store.usage()
        with self._lock:
            dropped, load_failed, lookups = dict(self._dropped), dict(self._load_failed), dict(self._lookups)
        return {
            "kvtier_chunks_hit_total": lookups["hit"],
            "kvtier_chunks_missed_total": lookups["missed"],
            "kvtier_chunks_loaded_total": stats.hits,
            "kvtier_chunks_load_failed_total": load_failed,
            "kvtier_chunks_stored_total": stats.stores,
            "kvtier_chunks_dropped_total": {"staging full": 0, **dropped},
            "kvtier_chunks_corrupt_total": sum(stats.corrupt.values()),
            "kvtier_chunks_evicted_total": stats.evictions,
            "kvtier_bytes_read_total": stats.bytes_read,
            "kvtier_bytes_written_total": stats.bytes_written,
            "kvtier_store_wait_seconds_total": self._wait_total_s,
            "kvtier_used_bytes": usage.used_bytes,
            "kvtier_quota_bytes": usage.quota_bytes,
            "kvtier_staging_bytes": self._allocator.ring.nbytes if self._cpu is None else 0,
            "kvtier_lmcache_cpu_pool_bytes": 0 if self._cpu is None else int(self._cpu.get_memory_allocator().size),
            "kvtier_staging_slots_free": self._allocator.ring.free if self._cpu is None else 0,
            "kvtier_chunks": usage.namespace_chunks,
            "kvtier_direct_io": self.store.direct_io,
            "kvtier_degraded": 0,
        }


def _vllm_config() -> Any | None:
    """vLLM's configuration of this process, or ``None`` outside vLLM."""
    import sys

    if "vllm.config" not in sys.modules:
        return None
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()
