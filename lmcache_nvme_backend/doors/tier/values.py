"""What a tier exports beside vLLM's own metrics of it (``vllm:kv_offload_tiering_*``)."""

from __future__ import annotations

from typing import Any


def exported_values(tier: Any) -> dict[str, Any]:
    """Values of ``metrics.METRICS`` as they are now. Nothing is reported of an engine step: none waits for the tier."""
    store = tier.store
    if store is None:
        return {}
    stats, usage, lookups = store.stats, store.usage(), tier.lookups.counts.snapshot()
    return {
        "kvtier_chunks_hit_total": lookups.get("hit", 0),
        "kvtier_chunks_missed_total": lookups.get("missed", 0),
        "kvtier_chunks_loaded_total": stats.hits,
        "kvtier_chunks_load_failed_total": {"absent": 0, **tier.transfers.load_failures.snapshot()},
        "kvtier_chunks_stored_total": stats.stores,
        "kvtier_chunks_dropped_total": {"too many in flight": 0, **tier.transfers.dropped.snapshot()},
        "kvtier_chunks_corrupt_total": sum(stats.corrupt.values()),
        "kvtier_chunks_evicted_total": stats.evictions,
        "kvtier_snapshots_ignored_total": stats.snapshots_ignored,
        "kvtier_bytes_read_total": stats.bytes_read,
        "kvtier_bytes_written_total": stats.bytes_written,
        "kvtier_used_bytes": usage.used_bytes,
        "kvtier_quota_bytes": usage.quota_bytes,
        "kvtier_staging_bytes": 0,
        "kvtier_chunks": usage.namespace_chunks,
        "kvtier_direct_io": store.direct_io,
        "kvtier_breaker_open": store.stands_aside,
        "kvtier_degraded": store.stands_aside,
    }
