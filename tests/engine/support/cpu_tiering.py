"""vLLM's real tiering on a CPU, deliberately broken as the upstream bug was. Loaded out of tree; only for tests."""

from __future__ import annotations

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager

from lmcache_nvme_backend.doors.tier.cpu_spec import CpuTieringOffloadingSpec


class StoresButNeverServes(CpuTieringOffloadingSpec):
    """Everything is stored, and no lookup ever finds it."""

    def get_manager(self) -> OffloadingManager:
        manager = super().get_manager()
        manager.lookup = lambda key, req_context: LookupResult.MISS  # type: ignore[method-assign]
        return manager
