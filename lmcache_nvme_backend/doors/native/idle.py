"""The two sides of a tier that could not be opened, under ``on_init_error: degrade``: nothing is found or stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)

from lmcache_nvme_backend.doors.native.transfers import NvmeLoadSpec, NvmeStoreSpec
from lmcache_nvme_backend.metrics import MetricsExporter
from lmcache_nvme_backend.store import ChunkKey


class IdleManager(OffloadingManager):
    """Answers as `NvmeOffloadingManager` does over an empty store that takes nothing."""

    def __init__(self, rank: int) -> None:
        pass

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def follow(self, req_context: ReqContext, hashes: Sequence[bytes], scope: str) -> None:
        pass

    def begin_lookup(self, req_context: ReqContext, computed_tokens: int) -> None:
        pass

    def end_lookup(self, req_context: ReqContext, computed_tokens: int, hit_tokens: int) -> None:
        pass

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def take_uses(self) -> list[list[ChunkKey]]:
        return []

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> NvmeLoadSpec:
        return NvmeLoadSpec([], [])

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        return PrepareStoreOutput([], NvmeStoreSpec([], []), [])

    def loads_failed(self, chunks: Iterable[ChunkKey]) -> None:
        pass

    def compare(self, namespace: str) -> None:
        pass

    def load_failed(self, req_context: ReqContext) -> None:
        pass


class IdleWorker(OffloadingWorker):
    """Fails every load at once, and stores nothing: another rank may work."""

    def __init__(self, rank: int) -> None:
        self._done: list[TransferResult] = []
        self._failed: set[ChunkKey] = set()
        self._metrics = MetricsExporter(lambda: {"kvtier_degraded": 1}, rank)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._failed |= set(src_spec.keys)
        self._done.append(TransferResult(job_id, False, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def take_failed(self) -> set[ChunkKey]:
        failed, self._failed = self._failed, set()
        return failed

    def used(self, prefixes: Iterable[Sequence[ChunkKey]]) -> None:
        pass

    def await_any(self, timeout_s: float) -> None:
        pass

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._metrics.close()
