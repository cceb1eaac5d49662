"""What a backend exports: one value for every declared metric."""

from __future__ import annotations

from typing import Any

from lmcache_nvme_backend.doors.store_values import lookup_values, lost_values, store_values
from lmcache_nvme_backend.metrics import Value


def exported_values(backend: Any) -> dict[str, Value]:
    """The values of ``metrics.METRICS`` as they are now."""
    ring = backend._allocator and backend._allocator.ring
    return {
        **lookup_values(backend._lookups),
        **lost_values(backend.loader.failed, backend.saver.dropped, "staging full"),
        **store_values(backend.store),
        "kvtier_store_seconds_total": backend.saver.step_s,
        "kvtier_load_seconds_total": backend.loader.retrieve_s,
        "kvtier_store_wait_seconds_total": backend.saver.waited_s,
        "kvtier_staging_bytes": ring.nbytes if ring else 0,
        "kvtier_lmcache_cpu_pool_bytes": 0 if backend._cpu is None else int(backend._cpu.get_memory_allocator().size),
        "kvtier_staging_slots_free": ring.free if ring else 0,
        "kvtier_degraded": backend.withdrawn or backend.store.stands_aside,
    }
