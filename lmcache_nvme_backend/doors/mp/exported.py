"""The adapters' numbers, on the ``/metrics`` that LMCache's server serves: the process's own Prometheus registry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lmcache_nvme_backend.doors.store_values import lookup_values, lost_values, namespace_values
from lmcache_nvme_backend.metrics import METRICS, Metric, Value

if TYPE_CHECKING:
    from lmcache_nvme_backend.doors.mp.adapter import NvmeL2Adapter
    from lmcache_nvme_backend.doors.mp.read_through import ReadThrough
    from lmcache_nvme_backend.doors.mp.spaces import Space

_adapters: list[NvmeL2Adapter] = []
_lock = threading.Lock()

REFUSED = Metric("kvtier_chunks_refused_total", "counter", "Chunks of unproven origin, by cause", "cause")
# `behind` is the store that several hosts share.
BEHIND = (
    Metric("kvtier_behind_up", "gauge", "1 where the store behind answered its last probe"),
    Metric("kvtier_behind_chunks_hit_total", "counter", "Chunks that lookups found behind and not here"),
    Metric("kvtier_behind_chunks_loaded_total", "counter", "Chunks loaded from behind, verified and served"),
    Metric("kvtier_behind_chunks_kept_total", "counter", "Chunks from behind written to this host's own store"),
    Metric("kvtier_behind_chunks_stored_total", "counter", "Chunks written to the store behind"),
    Metric("kvtier_behind_chunks_corrupt_total", "counter", "Chunks from behind that were not what was stored"),
    Metric("kvtier_behind_chunks_load_failed_total", "counter", "Chunks not loaded from behind, by cause", "cause"),
    Metric("kvtier_behind_chunks_dropped_total", "counter", "Chunks not written behind, by cause", "cause"),
    Metric("kvtier_behind_bytes_read_total", "counter", "Bytes read from the store behind"),
    Metric("kvtier_behind_bytes_written_total", "counter", "Bytes written to the store behind"),
    Metric("kvtier_behind_staging_bytes", "gauge", "Host memory for copies on their way to or from the store behind"),
)
_FAMILIES = {metric.name: metric for metric in (*METRICS, REFUSED, *BEHIND)}


def add(adapter: NvmeL2Adapter) -> None:
    """Export an adapter's numbers from now on."""
    with _lock:
        _adapters.append(adapter)
        if len(_adapters) == 1:
            REGISTRY.register(_collector)


def remove(adapter: NvmeL2Adapter) -> None:
    with _lock:
        if adapter in _adapters:
            _adapters.remove(adapter)
            if not _adapters:
                REGISTRY.unregister(_collector)


class _Collector:
    """One family a metric, with a series for each adapter's root and, where it is the model's, each model."""

    def describe(self) -> list[Any]:
        """Nothing: the registry would otherwise collect to find out, before there is anything to say."""
        return []

    def collect(self) -> Iterator[Any]:
        with _lock:
            adapters = list(_adapters)
        families: dict[str, Any] = {}
        for adapter in adapters:
            root = adapter.settings.tier.path
            spaces = adapter.spaces.all()
            for name, value in _root_values(adapter, spaces).items():
                _add(families, name, {"root": root}, value)
            for space in spaces:
                for name, value in _space_values(space).items():
                    _add(families, name, {"root": root, "model": space.model}, value)
        yield from families.values()


_collector = _Collector()


def _add(families: dict[str, Any], name: str, labels: dict[str, str], value: Value) -> None:
    metric = _FAMILIES[name]
    if name not in families:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        families[name] = kind(metric.family, metric.help, labels=[*labels, *metric.own_labels])
    for own, number in metric.series(value):
        families[name].add_metric([*labels.values(), *own], number)


def _root_values(adapter: NvmeL2Adapter, spaces: list[Space]) -> dict[str, Value]:
    aside = any(space.store.stands_aside for space in spaces)
    values: dict[str, Value] = {
        "kvtier_quota_bytes": adapter.settings.tier.quota_bytes,
        "kvtier_degraded": bool(adapter.degraded) or bool(adapter.spaces.refused()) or aside,
        "kvtier_breaker_open": aside,
        "kvtier_chunks_refused_total": {"unproven model": 0, **adapter.spaces.unproven.snapshot()},
    }
    if spaces:
        values["kvtier_used_bytes"] = spaces[0].store.usage().used_bytes
    return values if adapter.behind is None else values | _behind_values(adapter.behind)


def _behind_values(behind: ReadThrough) -> dict[str, Value]:
    counts = behind.counts.snapshot()
    chunks = {f"kvtier_behind_chunks_{name}_total": counts.get(name, 0) for name in _BEHIND_CHUNKS}
    return {
        **chunks,
        "kvtier_behind_up": behind.remote.up,
        "kvtier_behind_chunks_load_failed_total": {"absent": 0, **behind.failed.snapshot()},
        "kvtier_behind_chunks_dropped_total": {"down": 0, **behind.dropped.snapshot()},
        "kvtier_behind_bytes_read_total": counts.get("bytes_read", 0),
        "kvtier_behind_bytes_written_total": counts.get("bytes_written", 0),
        "kvtier_behind_staging_bytes": behind.buffers.limit_bytes,
    }


_BEHIND_CHUNKS = ("hit", "loaded", "kept", "stored", "corrupt")


def _space_values(space: Space) -> dict[str, Value]:
    return {
        **lookup_values(space.lookups),
        **lost_values(space.failed, space.dropped, "quota"),
        **namespace_values(space.store, space.store.usage()),
    }
