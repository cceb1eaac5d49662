"""The tier's numbers on the engine's own ``/metrics``, whichever process they are counted in.

The plugin lives in vLLM's worker, ``/metrics`` is served by the front process, and vLLM has no channel between the two
that moves without engine steps. So the worker writes absolute values into files that prometheus_client's multi-process
collector understands, and the front serves them from a directory that it made before it started its children.
PROMETHEUS_MULTIPROC_DIR itself is left alone: setting it would change how vLLM's own metrics are collected, and LMCache
overwrites it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from lmcache_nvme_backend.run_directory import make_run_directory

DIRECTORY_VARIABLE = "KVTIER_METRICS_DIR"
EXPORT_INTERVAL_S = 0.25  # a scrape is at most this old; an export is some twenty stores into an mmap


class Metric(msgspec.Struct, frozen=True):
    """One exported family. ``label`` is a second label beside the rank, or empty."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str = ""

    @property
    def family(self) -> str:
        """The name under which prometheus_client knows it."""
        return self.name.removesuffix("_total")

    @property
    def own_labels(self) -> tuple[str, ...]:
        return (self.label,) if self.label else ()

    def series(self, value: Value) -> Iterator[tuple[tuple[str, ...], float]]:
        """Each number of a value, with the values of ``own_labels``."""
        for label, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            yield (label,) if self.label else (), float(number)


# Of one metric: a number, or numbers by its own label.
Value = float | Mapping[str, float]
Values = Mapping[str, Value]

METRICS = (
    Metric("kvtier_chunks_hit_total", "counter", "Chunks that lookups found in the NVMe tier"),
    Metric("kvtier_chunks_missed_total", "counter", "Chunks that lookups did not find in the NVMe tier"),
    Metric("kvtier_chunks_loaded_total", "counter", "Chunks read from NVMe, verified and handed to the engine"),
    Metric(
        "kvtier_chunks_load_failed_total", "counter", "Chunks promised by a lookup that could not be loaded", "cause"
    ),
    Metric("kvtier_chunks_stored_total", "counter", "Chunks written to NVMe"),
    Metric("kvtier_chunks_dropped_total", "counter", "Chunks not stored, by cause", "cause"),
    Metric(
        "kvtier_chunks_corrupt_total", "counter", "Chunks whose bytes were not what was stored; removed, not served"
    ),
    Metric("kvtier_chunks_evicted_total", "counter", "Chunks evicted to keep the quota"),
    Metric("kvtier_snapshots_ignored_total", "counter", "Index snapshots that were damaged or of something else"),
    Metric("kvtier_bytes_read_total", "counter", "Bytes read from the store"),
    Metric("kvtier_bytes_written_total", "counter", "Bytes written to the store"),
    Metric("kvtier_store_seconds_total", "counter", "Time that stores took of engine steps, waits included"),
    Metric("kvtier_load_seconds_total", "counter", "Time that loads took of engine steps, waits included"),
    Metric("kvtier_store_wait_seconds_total", "counter", "Time that stores made engine steps wait for a staging slot"),
    Metric("kvtier_used_bytes", "gauge", "Bytes under the root, over all namespaces and processes of the host"),
    Metric("kvtier_quota_bytes", "gauge", "The host's quota"),
    Metric("kvtier_staging_bytes", "gauge", "Host memory of this rank's staging ring"),
    Metric("kvtier_lmcache_cpu_pool_bytes", "gauge", "Host memory of LMCache's own CPU pool in this rank"),
    Metric("kvtier_staging_slots_free", "gauge", "Staging slots free now"),
    Metric("kvtier_chunks", "gauge", "Chunks in this rank's namespace"),
    Metric("kvtier_direct_io", "gauge", "1 where chunks bypass the page cache"),
    Metric("kvtier_breaker_open", "gauge", "1 while the tier stands aside from a disk that fails"),
    Metric("kvtier_degraded", "gauge", "1 where the tier is configured and does not serve"),
)


def serve_children() -> None:
    """In the front process: serve what the children will export. Called before they start; a second call is nothing."""
    if os.environ.get(DIRECTORY_VARIABLE):
        return
    if shared := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        # Several API servers: each already serves every file of that directory.
        os.environ[DIRECTORY_VARIABLE] = shared
        return
    from prometheus_client import REGISTRY, multiprocess

    collector: Any = multiprocess.MultiProcessCollector
    directory = str(make_run_directory())
    os.environ[DIRECTORY_VARIABLE] = directory
    collector(REGISTRY, path=directory)


class MetricsExporter:
    """Exports ``read()`` from this process every ``EXPORT_INTERVAL_S`` seconds, until ``close``.

    ``read`` answers the values by metric name: a number, or numbers by the metric's own label. ``part`` tells several
    exporters of one rank in one process apart; their counters are added up.
    """

    def __init__(self, read: Callable[[], Values], rank: int, part: str = "") -> None:
        self._read, self._rank = read, str(rank)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if not directory or not Path(directory).is_dir():
            return
        from prometheus_client import mmap_dict

        self._key: Any = mmap_dict.mmap_key
        open_file: Any = mmap_dict.MmapedDict
        # The file's name is parsed as type_mode_id; an id of our own keeps it apart from prometheus_client's own files.
        self._files = {
            "counter": open_file(f"{directory}/counter_kvtier-{os.getpid()}-{rank}{part}.db"),
            "gauge": open_file(f"{directory}/gauge_mostrecent_kvtier-{os.getpid()}-{rank}{part}.db"),
        }
        self._export()
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()

    @property
    def exporting(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        while not self._stop.wait(EXPORT_INTERVAL_S):
            self._export()

    def _export(self) -> None:
        values = self._read()
        now = time.time()
        for metric in METRICS:
            value = values.get(metric.name)
            if value is None:
                continue
            names = ("rank", *metric.own_labels)
            for own, number in metric.series(value):
                key = self._key(metric.family, metric.name, names, (self._rank, *own), metric.help)
                self._files[metric.kind].write_value(key, number, now)

    def close(self) -> None:
        """One last export; then this process's values stand still."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=2)
        self._thread = None
        self._export()
        for file in self._files.values():
            file.close()
