"""vLLM's OffloadingConnector for this door: a failed load is a miss, and never the engine's end.

vLLM's own worker side asserts that every load succeeded. This one reports a request whose load failed as
`failed_recving`; vLLM then gives its blocks back and looks the request up again, by which time the scheduler's side
knows which chunks failed.
"""

from __future__ import annotations

from typing import Any

from lmcache_nvme_backend.doors.native.releases import check_release

check_release()

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: E402
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402

from lmcache_nvme_backend.doors import start  # noqa: E402
from lmcache_nvme_backend.doors.native.engine import entered  # noqa: E402
from lmcache_nvme_backend.doors.native.manager import NvmeOffloadingManager  # noqa: E402
from lmcache_nvme_backend.doors.native.transfers import NvmeConnectorMetadata, NvmeWorkerMetadata  # noqa: E402
from lmcache_nvme_backend.doors.native.worker import NvmeOffloadingWorker  # noqa: E402
from lmcache_nvme_backend.doors.scope import scope_of  # noqa: E402
from lmcache_nvme_backend.errors import ConfigError  # noqa: E402

# An idle step waits this long for a transfer to finish: without a wait the engine spins, and takes the interpreter from
# the threads that do the transfer.
IDLE_WAIT_S = 0.002


class NvmeConnectorScheduler(OffloadingConnectorScheduler):
    """Tells the manager what vLLM's interface leaves out: a request's block hashes and adapter, when a lookup begins
    and how it ends, and which loads failed."""

    manager: NvmeOffloadingManager

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        scope = scope_of(getattr(request, "lora_request", None), None)
        self.manager.follow(status.req_context, request.block_hashes, scope)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[int | None, bool]:
        status = self._req_status[request.request_id]
        asks = not status.transfer_jobs and not request.skip_reading_prefix_cache
        if asks:
            self.manager.begin_lookup(status.req_context, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, *args, **kwargs
        )
        if asks and found[0] is not None:  # else it is asked again, and has used nothing yet
            self.manager.end_lookup(status.req_context, num_computed_tokens, found[0])
        return found

    def build_connector_meta(self, scheduler_output: Any) -> NvmeConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        return NvmeConnectorMetadata(
            load_jobs=meta.load_jobs,
            store_jobs=meta.store_jobs,
            jobs_to_flush=meta.jobs_to_flush,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            uses=self.manager.take_uses(),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, NvmeWorkerMetadata):
            self.manager.loads_failed(meta.failed_keys)
            self.manager.compare(meta.namespace)
        for request_id in connector_output.failed_recving or ():
            if (status := self._req_status.get(request_id)) is not None:
                self.manager.load_failed(status.req_context)
                # It skipped these chunks as ones that are stored already. They are offered again once computed.
                for group in status.group_states:
                    group.next_stored_chunk_idx = 0
        super().update_connector_output(connector_output)


class NvmeConnectorWorker(OffloadingConnectorWorker):
    """The worker's side, for transfers that may fail."""

    worker: NvmeOffloadingWorker | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connector_worker_meta = NvmeWorkerMetadata()
        self.failed_recving: set[str] = set()

    def start_kv_transfers(self, metadata: Any) -> None:
        if self.worker is not None:
            self.worker.used(metadata.uses)
        super().start_kv_transfers(metadata)
        if metadata.idle and self.worker is not None:
            self.worker.await_any(IDLE_WAIT_S)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.worker is not None
        received = set()
        for result in self.worker.get_finished():
            request_id = self._load_jobs.pop(result.job_id, None)
            stats = self._connector_worker_meta.transfer_stats
            if result.transfer_size:
                (stats.store if request_id is None else stats.load).record(result.transfer_size, result.transfer_time)
            self._connector_worker_meta.mark_completed(result.job_id)
            if request_id is not None:
                received.add(request_id)
                if not result.success:
                    self.failed_recving.add(request_id)
        self._connector_worker_meta.failed_keys |= self.worker.take_failed()
        return set(), received

    def build_connector_worker_meta(self) -> NvmeWorkerMetadata | None:
        meta: NvmeWorkerMetadata | None = super().build_connector_worker_meta()
        if meta is not None:
            self._connector_worker_meta = NvmeWorkerMetadata()
            if self.spec.config.parallel.rank == 0:
                meta.namespace = self.spec.namespace.digest
        return meta

    def take_failed_recving(self) -> set[str]:
        failed, self.failed_recving = self.failed_recving, set()
        return failed


class NvmeOffloadingConnector(OffloadingConnector):
    """`kv_connector: NvmeOffloadingConnector`, `kv_connector_module_path: lmcache_nvme_backend`.

    Raises (constructor):
        StartRefused: whatever a person can put right; vLLM's start ends with it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        try:
            with entered(vllm_config, role, kv_cache_config) as engine:
                super().__init__(vllm_config, role, kv_cache_config)
        except ConfigError as e:
            raise start.refuse(e) from e
        # The base class has made vLLM's own two sides; neither does anything when it is made.
        if engine.schedules:
            self.connector_scheduler: Any = NvmeConnectorScheduler(engine.spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = NvmeConnectorWorker(engine.spec, vllm_config, kv_cache_config)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sending, receiving = self.get_finished(finished_req_ids)
        assert isinstance(self.connector_worker, NvmeConnectorWorker)
        return KVConnectorTransferResults(
            finished_sending=sending,
            finished_recving=receiving,
            failed_recving=self.connector_worker.take_failed_recving(),
        )
