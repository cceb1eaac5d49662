"""What every door exports of a store, by metric name: each adds what only it counts."""

from __future__ import annotations

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.metrics import Value
from lmcache_nvme_backend.store import ChunkStore, Usage


def store_values(store: ChunkStore) -> dict[str, Value]:
    """Of a door's only store: its namespace, the root, and whether it serves."""
    usage = store.usage()
    return namespace_values(store, usage) | {
        "kvtier_used_bytes": usage.used_bytes,
        "kvtier_quota_bytes": usage.quota_bytes,
        "kvtier_breaker_open": store.stands_aside,
        "kvtier_degraded": store.stands_aside,
    }


def namespace_values(store: ChunkStore, usage: Usage) -> dict[str, Value]:
    """Of the namespace that a store has open; `usage` is that store's."""
    stats = store.stats
    return {
        "kvtier_chunks_loaded_total": stats.hits,
        "kvtier_chunks_stored_total": stats.stores,
        "kvtier_chunks_corrupt_total": sum(stats.corrupt.values()),
        "kvtier_chunks_evicted_total": stats.evictions,
        "kvtier_snapshots_ignored_total": stats.snapshots_ignored,
        "kvtier_bytes_read_total": stats.bytes_read,
        "kvtier_bytes_written_total": stats.bytes_written,
        "kvtier_chunks": usage.namespace_chunks,
        "kvtier_direct_io": store.direct_io,
    }


def lookup_values(lookups: Counts) -> dict[str, Value]:
    """Of lookups counted as `hit` and `missed`."""
    counts = lookups.snapshot()
    return {
        "kvtier_chunks_hit_total": counts.get("hit", 0),
        "kvtier_chunks_missed_total": counts.get("missed", 0),
    }


def lost_values(failed: Counts, dropped: Counts, usual_drop: str) -> dict[str, Value]:
    """Of loads that failed and of chunks that were not stored, by cause. A cause that is usual for the door is there
    from the first scrape, at 0, so that its first count is seen as an increase."""
    return {
        "kvtier_chunks_load_failed_total": {"absent": 0, **failed.snapshot()},
        "kvtier_chunks_dropped_total": {usual_drop: 0, **dropped.snapshot()},
    }
