"""The worker's side: vLLM's interface over the loads and the stores of one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from lmcache_nvme_backend.doors.native.copies import Copier
from lmcache_nvme_backend.doors.native.layout import GroupLayout, chunks_of, stored_chunks_of
from lmcache_nvme_backend.doors.native.loads import ChunkLoads
from lmcache_nvme_backend.doors.native.stores import ChunkStores
from lmcache_nvme_backend.doors.native.transfers import NvmeLoadSpec, NvmeStoreSpec
from lmcache_nvme_backend.doors.store_values import lost_values, store_values
from lmcache_nvme_backend.metrics import Value
from lmcache_nvme_backend.staging import StagingRing
from lmcache_nvme_backend.store import ChunkKey, ChunkStore

# vLLM ends its workers soon after it has told them to: writes in flight get this much of it.
CLOSE_WAIT_S = 5.0


class NvmeOffloadingWorker(OffloadingWorker):
    """Asynchronous transfers between the device's blocks and the chunk store. Called by the engine's thread alone.

    Args:
        layouts: one a KV cache group, in vLLM's order.
        tokens: how many tokens a chunk of each group stands for.
        store_wait_s: how long a step waits at most for blocks that vLLM wants back.
        close: called when all transfers have ended.
    """

    def __init__(
        self,
        store: ChunkStore,
        ring: StagingRing,
        copier: Copier,
        layouts: Sequence[GroupLayout],
        tokens: Sequence[int],
        io_threads: int,
        store_wait_s: float,
        close: Callable[[], None],
    ) -> None:
        self.store, self.ring = store, ring
        self._copier, self._layouts, self._wait_s, self._close = copier, layouts, store_wait_s, close
        self._changed = threading.Condition()
        # A thread that reads also copies, and on a busy machine waits for a core: as many again keep the drive busy.
        self.loads = ChunkLoads(store, ring, copier, layouts, 2 * io_threads, self._changed)
        self.stores = ChunkStores(store, ring, copier, layouts, tokens, io_threads, self._changed)
        self._failed: set[ChunkKey] = set()
        self.stores_s = self.loads_s = 0.0  # time taken of engine steps

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: NvmeStoreSpec) -> bool:
        began = time.perf_counter()
        chunks = stored_chunks_of(*_blocks(src_spec), dst_spec.counts, self._layouts[0].blocks)
        self.stores.submit(job_id, dst_spec.places, list(chunks), self._copier.mark())
        self.stores_s += time.perf_counter() - began
        return True

    def used(self, prefixes: Iterable[Sequence[ChunkKey]]) -> None:
        """Requests use these without a load. The scheduler's store knows; the order of eviction of this process, where
        that is another, goes by what it is told."""
        for prefix in prefixes:
            self.store.match(prefix, again=True)

    def submit_load(self, job_id: int, src_spec: NvmeLoadSpec, dst_spec: GPULoadStoreSpec) -> bool:
        began = time.perf_counter()
        # The store of this process may not be the scheduler's: its order of eviction goes by this use.
        self.store.match(src_spec.prefix)
        chunks = chunks_of(*_blocks(dst_spec), self._layouts[0].blocks)
        self.loads.submit(job_id, src_spec.keys, list(chunks), self._copier.mark())
        self.loads_s += time.perf_counter() - began
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for store in self.stores.finished():
            results.append(TransferResult(store.job_id, True, store.nbytes, store.seconds))
        for load in self.loads.finished():
            self._failed |= load.failed
            results.append(TransferResult(load.job_id, load.success, load.nbytes, load.seconds))
        return results

    def take_failed(self) -> set[ChunkKey]:
        """The chunks that could not be loaded, of the jobs reported since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def await_any(self, timeout_s: float) -> None:
        """Until a transfer has finished, while any is under way; at most `timeout_s` seconds."""
        loads, stores = self.loads.jobs, self.stores.jobs
        if loads.busy or stores.busy:
            with self._changed:
                self._changed.wait_for(lambda: loads.any_over or stores.any_over, timeout_s)

    def wait(self, job_ids: set[int]) -> None:
        """Until vLLM may hand the blocks of these jobs to somebody else. Waits `store_wait_s` at most, and then for the
        chunk that is being copied."""
        began = time.perf_counter()
        self.stores.wait(job_ids, self._wait_s)
        self.stores_s += time.perf_counter() - began
        self.loads.wait(job_ids, self._wait_s)

    def shutdown(self) -> None:
        self.loads.close()
        self.stores.close(CLOSE_WAIT_S)
        self._close()

    def values(self) -> dict[str, Value]:
        """This rank's numbers, by metric name."""
        return {
            **lost_values(self.loads.failed, self.stores.dropped, "staging full"),
            **store_values(self.store),
            "kvtier_chunks_loaded_total": self.loads.loaded,
            "kvtier_store_seconds_total": self.stores_s,
            "kvtier_load_seconds_total": self.loads_s,
            "kvtier_store_wait_seconds_total": self.stores.waited_s,
            "kvtier_staging_bytes": self.ring.nbytes,
            "kvtier_staging_slots_free": self.ring.free,
        }


def _blocks(spec: GPULoadStoreSpec) -> tuple[list[int], Sequence[int], Sequence[int]]:
    return [int(block) for block in spec.block_ids], spec.group_sizes, spec.block_indices
