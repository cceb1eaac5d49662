"""vLLM's tiering on a CPU: its spec, manager and host buffer, with a memcpy in place of the copy from and to a device.

vLLM's own worker refuses the CPU. This one makes the whole stack run, and be tested, on any machine::

    {"spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "lmcache_nvme_backend", …}
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies at once: every transfer is over when it has been submitted."""

    def __init__(self, caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._pages = [cache.page_size_bytes for cache in caches.tensors]
        self._pool = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in caches.tensors]
        self._host = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, to_host: bool) -> bool:
        began, moved = time.perf_counter(), 0
        block_ids, chunk_ids = map(int, blocks.block_ids), iter(map(int, chunks.block_ids))
        for refs, size, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            chunk = -1
            for at in range(size):
                part = (first + at) % self._per_chunk
                if part == 0 or at == 0:
                    chunk = next(chunk_ids)
                block = next(block_ids)
                for ref in refs:
                    page, nbytes = self._pages[ref.tensor_idx], ref.page_size_bytes
                    pool = self._pool[ref.tensor_idx][block, :nbytes]
                    host = self._host[ref.tensor_idx][chunk, part * page : part * page + nbytes]
                    (host if to_host else pool).copy_(pool if to_host else host)
                    moved += nbytes
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over when it has been submitted."""

    def shutdown(self) -> None:
        self._pool, self._host = [], []
        self._region.cleanup()


class CpuTieringOffloadingSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with the worker above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker: OffloadingWorker | None = getattr(self, "_worker", None)  # where vLLM's own class keeps it
        if worker is None:
            # 0.29 says blocks for what is a chunk.
            noun = "chunk" if "num_chunks" in inspect.signature(SharedOffloadRegion.__init__).parameters else "block"
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                rank=self.config.parallel.rank,
                cpu_page_size=self.cpu_page_size_per_worker,
                **{f"num_{noun}s": getattr(self, f"num_{noun}s"), f"kv_bytes_per_{noun}": self.kv_bytes_per_chunk},
            )
            worker = self._worker = MemcpyWorker(kv_caches, region, self.blocks_per_chunk)
        return worker
