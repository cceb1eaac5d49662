"""What a backend exports: one value for every declared metric."""

from __future__ import annotations

from typing import Any


def exported_values(backend: Any) -> dict[str, Any]:
    """The values of ``metrics.METRICS`` as they are now."""
    stats, usage, ring = backend.store.stats, backend.store.usage(), backend._allocator and backend._allocator.ring
    lookups = backend._lookups.snapshot()
    return {
        "kvtier_chunks_hit_total": lookups.get("hit", 0),
        "kvtier_chunks_missed_total": lookups.get("missed", 0),
        "kvtier_chunks_loaded_total": stats.hits,
        "kvtier_chunks_load_failed_total": {"absent": 0, **backend.loader.failed.snapshot()},
        "kvtier_chunks_stored_total": stats.stores,
        "kvtier_chunks_dropped_total": {"staging full": 0, **backend.saver.dropped.snapshot()},
        "kvtier_chunks_corrupt_total": sum(stats.corrupt.values()),
        "kvtier_chunks_evicted_total": stats.evictions,
        "kvtier_snapshots_ignored_total": stats.snapshots_ignored,
        "kvtier_bytes_read_total": stats.bytes_read,
        "kvtier_bytes_written_total": stats.bytes_written,
        "kvtier_store_seconds_total": backend.saver.step_s,
        "kvtier_load_seconds_total": backend.loader.retrieve_s,
        "kvtier_store_wait_seconds_total": backend.saver.waited_s,
        "kvtier_used_bytes": usage.used_bytes,
        "kvtier_quota_bytes": usage.quota_bytes,
        "kvtier_staging_bytes": ring.nbytes if ring else 0,
        "kvtier_lmcache_cpu_pool_bytes": 0 if backend._cpu is None else int(backend._cpu.get_memory_allocator().size),
        "kvtier_staging_slots_free": ring.free if ring else 0,
        "kvtier_chunks": usage.namespace_chunks,
        "kvtier_direct_io": backend.store.direct_io,
        "kvtier_breaker_open": backend.store.stands_aside,
        "kvtier_degraded": backend.withdrawn or backend.store.stands_aside,
    }
