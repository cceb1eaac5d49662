"""`NvmeTier`: the chunk store as a secondary tier behind vLLM's own tiering (`TieringOffloadingSpec`).

vLLM keeps a host buffer and copies KV between it and the device; what is stored in it is offered to the tier, and what
is missing from it is asked of the tier, chunk by chunk. The tier moves the buffer's rows to the disk and back. It runs
in the scheduler's process, on whose thread vLLM calls it; nothing here waits, and nothing raises but the constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from lmcache_nvme_backend.errors import ConfigError

try:
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ConfigError(
        "vllm", f"a version whose tiering this tier does not know ({error})", "versions 0.29 to 0.33",
        "Install one of them.",
    ) from error  # fmt: skip

from lmcache_nvme_backend.doors import start
from lmcache_nvme_backend.doors.tier import opening
from lmcache_nvme_backend.doors.tier.lookups import Lookups
from lmcache_nvme_backend.doors.tier.requests import Origin, RequestPrefix
from lmcache_nvme_backend.doors.tier.row_test import check_rows
from lmcache_nvme_backend.doors.tier.transfers import Transfers
from lmcache_nvme_backend.doors.tier.values import exported_values
from lmcache_nvme_backend.metrics import MetricsExporter
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.store import ChunkStore

logger = logging.getLogger("vllm.lmcache_nvme_backend")

# Store jobs keep their rows of the host buffer from being used again: at most this part of them.
STORE_SHARE = 2
# At its end, what is on its way gets this long: more is a disk that hangs.
CLOSE_WAIT_S = 10.0


class NvmeTier(SecondaryTierManager):
    """`{"type": "NvmeTier", "module_path": "lmcache_nvme_backend", "root_dir": …, "quota_gib": …}`

    Raises (constructor):
        ConfigError: whatever a person can put right; it ends the engine's start, unless `on_init_error` is `degrade`.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **config: Any,
    ) -> None:
        detector = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        self.locality = None if locality is None else Locality(locality)
        assert primary_kv_view.shape is not None and primary_kv_view.strides is not None
        self._rows, self._row_bytes = primary_kv_view.shape[0], primary_kv_view.strides[0]
        self._store: ChunkStore | None = None
        self._rank = int(offloading_spec.config.parallel.data_parallel_index)
        self._metrics: MetricsExporter | None = None
        self._not_done: list[JobResult] = []  # jobs of a degraded tier
        try:
            self._open(config)
        except Exception as e:
            self._abandon()
            if config.get("on_init_error") == "degrade":
                start.announce_degraded(e)
                self._metrics = MetricsExporter(lambda: {"kvtier_degraded": 1}, self._rank)
                return
            start.refuse(e)  # the front process repeats the reason
            raise

    # --- life

    def _open(self, config: dict[str, Any]) -> None:
        opening.check_version(opening.vllm_version())
        self.settings: NvmeSettings = opening.parse(config)
        engine = opening.surrounding_engine()
        self.groups = opening.cache_groups(self._offloading_spec.config, engine)
        store = self._store = opening.open_tier_store(
            self.settings, self._offloading_spec, engine, self.groups, self._row_bytes
        )
        hashes, states = (
            opening.unstable_hash_warning(engine.vllm_config),
            opening.states_warning(self._offloading_spec.config, engine),
        )
        for warning in filter(None, (hashes, states)):
            logger.warning("lmcache_nvme_backend: %s", warning)
        self._buffer = self._primary_kv_view.cast("B")
        if self.settings.self_test == "on":
            check_rows(store, self._buffer, self._rows, self._row_bytes)
        self.lookups = Lookups(store)
        self.transfers = Transfers(
            store, self._buffer, self._row_bytes, self.settings.io_threads, max(1, self._rows // STORE_SHARE)
        )
        self._metrics = MetricsExporter(lambda: exported_values(self), self._rank)
        usage = store.usage()
        logger.info(
            "lmcache_nvme_backend: NvmeTier serves from %s: %d chunks of %.2f MiB in this namespace, %.2f of %.2f GiB "
            "used; groups %s",
            store.directory, usage.namespace_chunks, self._row_bytes / 2**20, usage.used_bytes / 2**30,
            usage.quota_bytes / 2**30,
            ", ".join(f"{g.number}: {'all' if g.window is None else g.window}" for g in self.groups),
        )  # fmt: skip

    def _abandon(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def store(self) -> ChunkStore | None:
        """None where the tier is degraded or shut down."""
        return self._store

    def shutdown(self) -> None:
        """Let running transfers end within `CLOSE_WAIT_S`, fail the rest, leave the root. Idempotent.

        Raises `RuntimeError` where the disk hangs in a transfer: vLLM then leaves its buffer mapped, which is right.
        """
        store, self._store = self._store, None
        if self._metrics is not None:
            self._metrics.close()
        if store is None:
            return
        over = self.transfers.close(CLOSE_WAIT_S)
        self.lookups.close()
        store.close()
        if not over:
            raise RuntimeError("lmcache_nvme_backend: a transfer hangs in the disk")
        self._buffer.release()

    # --- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._store is not None:
            self.lookups.begin(req_context.req_id, self._prefix(req_context))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._store is not None:
            self.lookups.forget(req_context.req_id)

    def _prefix(self, req_context: ReqContext) -> RequestPrefix:
        """What is known of the request, in the context that vLLM passes to every call."""
        found: RequestPrefix | None = req_context.get_state(RequestPrefix)
        if found is None:
            found = RequestPrefix(req_context.get_state(Origin), self.groups)
            req_context.set_state(found)
        return found

    # --- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._store is None:
            return LookupResult.MISS
        found = self.lookups.ask(req_context.req_id, self._prefix(req_context), key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._store is not None:
            self.lookups.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: the lookups of a request are a use of its prefix."""

    # --- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._store is None:
            self._not_done.append(JobResult(job_id=job_metadata.job_id, success=False))
        else:
            self.transfers.store(*self._job(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self._store is None:
            self._not_done.append(JobResult(job_id=job_metadata.job_id, success=False))
        else:
            self.transfers.load(*self._job(job_metadata))

    def _job(self, job: TransferJob) -> tuple[int, str, RequestPrefix, Collection[OffloadKey], Iterable[int]]:
        rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # its name up to 0.29
        return job.job_id, job.req_context.req_id, self._prefix(job.req_context), job.keys, rows

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._not_done = self._not_done, []
        for outcome in self.transfers.finished() if self._store is not None else ():
            if outcome.is_load and not outcome.success:
                loaded = set(outcome.done)
                self.lookups.failed(outcome.request_id, [key for key in outcome.keys if key not in loaded])
            elif not outcome.is_load:
                self.lookups.stored(outcome.request_id, outcome.done)
            result = JobResult(
                job_id=outcome.job_id,
                success=outcome.success,
                successful_keys=tuple(outcome.done) if outcome.is_load and not outcome.success else None,
                transfer_time=outcome.seconds,
            )
            if hasattr(result, "transfer_bytes"):
                result.transfer_bytes = outcome.nbytes
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        if self._store is not None:
            self.transfers.wait()
