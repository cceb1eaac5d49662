"""What the scheduler's side tells the workers of one transfer, and what they answer. All of it is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from lmcache_nvme_backend.doors.hybrid_prefix import Place
from lmcache_nvme_backend.store import ChunkKey


@dataclass
class NvmeStoreSpec(LoadStoreSpec):
    """Where the chunks of a store go, in the order of its blocks, and how many of them each group has."""

    places: list[Place]
    counts: list[int]


@dataclass
class NvmeLoadSpec(LoadStoreSpec):
    """The chunks of a load in the order of its blocks, and the prefix that the request uses, head first."""

    keys: list[ChunkKey]
    prefix: list[ChunkKey]


@dataclass
class NvmeConnectorMetadata(OffloadingConnectorMetadata):
    """`idle`: nothing is computed in this step, so its worker may wait a moment for a transfer to finish. `uses`: the
    prefixes, head first, of requests that need no load."""

    idle: bool = False
    uses: list[list[ChunkKey]] = field(default_factory=list)


@dataclass
class NvmeWorkerMetadata(OffloadingWorkerMetadata):
    """Beside the finished jobs: chunks that some rank could not load, and the namespace that rank 0 has open."""

    failed_keys: set[ChunkKey] = field(default_factory=set)
    namespace: str = ""

    def aggregate(self, other: Any) -> NvmeWorkerMetadata:
        both = super().aggregate(other)
        return NvmeWorkerMetadata(
            completed_jobs=both.completed_jobs,
            transfer_stats=both.transfer_stats,
            failed_keys=self.failed_keys | getattr(other, "failed_keys", set()),
            namespace=self.namespace or getattr(other, "namespace", ""),
        )
