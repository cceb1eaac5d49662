"""One look at an engine's /metrics, in the units that people think in."""

from __future__ import annotations

import time

import httpx
import msgspec

from kvtier.plan.advice import EngineFigures
from kvtier.scrape import Metrics
from lmcache_nvme_backend.errors import ConfigError

_TIMEOUT_S = 10.0
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHED_SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's metrics say at one moment. Counters run since the engine's start; None is "does not say"."""

    at: float
    """Seconds on this machine's monotonic clock."""
    figures: EngineFigures
    running: int
    waiting: dict[str, int]
    """Requests waiting, by reason."""
    pool_usage: float
    tokens: dict[str, int]
    """Prompt tokens by source: local_compute, local_cache_hit, external_kv_transfer."""
    cached: dict[str, int]
    """Cached prompt tokens by tier (0.32 and later): device, host, disk, …"""
    prefix: tuple[int, int]
    """Prefix cache of the pool: tokens hit, tokens asked."""
    external: tuple[int, int]
    """Connector: tokens hit, tokens asked."""
    preemptions: int
    queue_s: tuple[float, int]
    """Sum of queue times, number of requests."""
    ttft_s: tuple[float, int]
    generated: int
    stored_bytes: int
    """Bytes that left the pool for a tier."""
    loaded_bytes: int
    store_s: float
    load_s: float
    disk_written_bytes: int
    """Bytes that reached a disk tier (fs, or this project's)."""
    disk_read_bytes: int
    drafted: int
    accepted: int
    native: bool
    """vLLM's own offload exports its metrics."""
    plugin: bool
    """This project's backend exports its metrics."""
    degraded: bool
    used_bytes: int | None
    quota_bytes: int | None
    load_failures: int

    @property
    def computed(self) -> int:
        return self.tokens["local_compute"]

    @property
    def from_tier(self) -> int:
        return self.tokens["external_kv_transfer"]


def take(metrics: Metrics) -> Snapshot:
    """Read a scrape."""
    value = metrics.value
    info = next(iter(metrics.samples("vllm:cache_config_info")), ({}, 0.0))[0]
    tiers = [
        labels["tier"] for labels, _ in metrics.samples("vllm:kv_offload_tiering_write_bytes_total") if "tier" in labels
    ]
    stored = value("vllm:kv_offload_store_bytes_total") or _old_bytes(metrics, "GPU_to_CPU")
    loaded = value("vllm:kv_offload_load_bytes_total") or _old_bytes(metrics, "CPU_to_GPU")
    plugin = metrics.get("kvtier_quota_bytes") is not None or metrics.get("kvtier_degraded") is not None
    plugin_written, plugin_read = value("kvtier_bytes_written_total"), value("kvtier_bytes_read_total")
    return Snapshot(
        at=time.monotonic(),
        figures=_figures(info, metrics),
        running=int(value("vllm:num_requests_running")),
        waiting=_waiting(metrics),
        pool_usage=value("vllm:kv_cache_usage_perc"),
        tokens=_tokens(metrics),
        cached={
            source: int(value("vllm:prompt_tokens_cached_by_source_total", source=source)) for source in _CACHED_SOURCES
        },
        prefix=(int(value("vllm:prefix_cache_hits_total")), int(value("vllm:prefix_cache_queries_total"))),
        external=(
            int(value("vllm:external_prefix_cache_hits_total")),
            int(value("vllm:external_prefix_cache_queries_total")),
        ),
        preemptions=int(value("vllm:num_preemptions_total")),
        queue_s=(value("vllm:request_queue_time_seconds_sum"), int(value("vllm:request_queue_time_seconds_count"))),
        ttft_s=(value("vllm:time_to_first_token_seconds_sum"), int(value("vllm:time_to_first_token_seconds_count"))),
        generated=int(value("vllm:generation_tokens_total")),
        stored_bytes=int(stored + plugin_written),
        loaded_bytes=int(loaded + plugin_read),
        store_s=value("vllm:kv_offload_store_time_total"),
        load_s=value("vllm:kv_offload_load_time_total"),
        disk_written_bytes=int(
            sum(value("vllm:kv_offload_tiering_write_bytes_total", tier=tier) for tier in set(tiers)) + plugin_written
        ),
        disk_read_bytes=int(value("vllm:kv_offload_tiering_read_bytes_total") + plugin_read),
        drafted=int(value("vllm:spec_decode_num_draft_tokens_total")),
        accepted=int(value("vllm:spec_decode_num_accepted_tokens_total")),
        native=metrics.get("vllm:kv_offload_cpu_cache_usage_perc") is not None
        or metrics.get("vllm:kv_offload_store_bytes_total") is not None,
        plugin=plugin,
        degraded=bool(value("kvtier_degraded")),
        used_bytes=_whole(_largest(metrics, "kvtier_used_bytes")),
        quota_bytes=_whole(_largest(metrics, "kvtier_quota_bytes")),
        load_failures=int(
            value("kvtier_chunks_load_failed_total") + value("vllm:kv_offload_tiering_promotion_job_failures_total")
        ),
    )


def scrape(url: str, client: httpx.Client | None = None) -> Snapshot:
    """Look at the engine at `url` (its root, such as http://127.0.0.1:8000).

    Raises:
        ConfigError: nothing answers there, or it is not vLLM.
    """
    return take(metrics_of(url, client))


def metrics_of(url: str, client: httpx.Client | None = None) -> Metrics:
    """The engine's metrics; errors as for `scrape`."""
    where = f"{root_of(url)}/metrics"
    try:
        answer = client.get(where) if client else httpx.get(where, timeout=_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            "--url",
            f"{url} ({error})",
            "the root of a running vLLM, such as http://127.0.0.1:8000",
            "Start the engine, or give its address.",
        ) from error
    found = Metrics(answer.text)
    if found.get("vllm:kv_cache_usage_perc") is None:
        raise ConfigError(
            "--url",
            f"{url} without vLLM's metrics",
            "the root of a running vLLM",
            "Give the engine's own address, not the proxy's.",
        )
    return found


def root_of(url: str) -> str:
    """The address without a trailing slash or /v1."""
    return url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")


def _figures(info: dict[str, str], metrics: Metrics) -> EngineFigures:
    pool, concurrency = _number(info.get("kv_cache_size_tokens")), _number(info.get("kv_cache_max_concurrency"))
    if not pool:  # before 0.28 only blocks are told; on models of several groups that is an upper bound
        pool = (_number(info.get("num_gpu_blocks")) or 0) * (_number(info.get("block_size")) or 0) or None
    return EngineFigures(
        source="/metrics",
        pool_tokens=int(pool) if pool else None,
        max_concurrency=concurrency,
        context=round(pool / concurrency) if pool and concurrency else None,
        gpu_memory_utilization=_number(info.get("gpu_memory_utilization")),
        preemptions=int(metrics.value("vllm:num_preemptions_total")),
        waiting_for_capacity=int(metrics.value("vllm:num_requests_waiting_by_reason", reason="capacity")),
    )


def _tokens(metrics: Metrics) -> dict[str, int]:
    """Prompt tokens by source; before that metric, by the hit counters (which count tokens too) and what they leave."""
    if metrics.get("vllm:prompt_tokens_by_source_total") is not None:
        return {source: int(metrics.value("vllm:prompt_tokens_by_source_total", source=source)) for source in _SOURCES}
    pool, tier = (int(metrics.value(f"vllm:{kind}_hits_total")) for kind in ("prefix_cache", "external_prefix_cache"))
    computed = max(int(metrics.value("vllm:prompt_tokens_total")) - pool - tier, 0)
    return dict(zip(_SOURCES, (computed, pool, tier), strict=True))


def _waiting(metrics: Metrics) -> dict[str, int]:
    found = {labels["reason"]: int(count) for labels, count in metrics.samples("vllm:num_requests_waiting_by_reason")}
    return found or {"any": int(metrics.value("vllm:num_requests_waiting"))}


def _old_bytes(metrics: Metrics, kind: str) -> float:
    return metrics.value("vllm:kv_offload_total_bytes_total", transfer_type=kind)


def _largest(metrics: Metrics, name: str) -> float | None:
    """A host-wide gauge is told by every rank: the largest, not the sum."""
    values = [number for _, number in metrics.samples(name)]
    return max(values) if values else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text not in (None, "None", "") else None
    except ValueError:
        return None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
