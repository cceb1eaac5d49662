"""What a tier exports beside vLLM's own metrics of it (``vllm:kv_offload_tiering_*``)."""

from __future__ import annotations

from typing import Any

from lmcache_nvme_backend.doors.store_values import lookup_values, lost_values, store_values
from lmcache_nvme_backend.doors.tier.transfers import IN_FLIGHT
from lmcache_nvme_backend.metrics import Value


def exported_values(tier: Any) -> dict[str, Value]:
    """Values of ``metrics.METRICS`` as they are now. Nothing is reported of an engine step: none waits for the tier."""
    store = tier.store  # once: a shutdown takes it away
    if store is None:
        return {}
    return {
        **lookup_values(tier.lookups.counts),
        **lost_values(tier.transfers.load_failures, tier.transfers.dropped, IN_FLIGHT),
        **store_values(store),
        "kvtier_staging_bytes": 0,
    }
