"""vLLM's real tiering on a CPU: its spec, manager, shared region and fs tier, with a memcpy in place of the device
copy.

The released worker refuses the CPU. Loaded out of tree by `spec_name` and `spec_module_path`; only for tests.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies blocks at once; one block a chunk."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._refs = caches.group_data_refs
        self._pool = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in caches.tensors]
        self._tier = [region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, src_spec.block_ids, dst_spec.block_ids, self._pool, self._tier)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, dst_spec.block_ids, self._tier, self._pool)

    def _copy(
        self,
        job_id: int,
        groups: GPULoadStoreSpec,
        source: Any,
        target: Any,
        from_: list[torch.Tensor],
        to: list[torch.Tensor],
    ) -> bool:
        began, moved, at = time.perf_counter(), 0, 0
        for refs, size in zip(self._refs, groups.group_sizes, strict=True):
            for ref in refs:
                for one, other in zip(source[at : at + size], target[at : at + size], strict=True):
                    to[ref.tensor_idx][int(other), : ref.page_size_bytes] = from_[ref.tensor_idx][
                        int(one), : ref.page_size_bytes
                    ]
                    moved += ref.page_size_bytes
            at += size
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over when it has been submitted."""

    def shutdown(self) -> None:
        self._pool, self._tier = [], []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """The tiering spec with the worker above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)  # type: ignore[assignment]
        return self._worker


class StoresButNeverServes(CpuTieringSpec):
    """The same, deliberately broken as the upstream bug was: everything is stored, and no lookup ever finds it."""

    def get_manager(self) -> OffloadingManager:
        manager = super().get_manager()
        manager.lookup = lambda key, req_context: LookupResult.MISS  # type: ignore[method-assign]
        return manager
