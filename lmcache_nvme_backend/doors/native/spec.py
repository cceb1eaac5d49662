"""The spec that vLLM's configuration names: settings in, the two sides out."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker

from lmcache_nvme_backend.doors import refusals, start
from lmcache_nvme_backend.doors.hybrid_prefix import ORDER, CacheGroup
from lmcache_nvme_backend.doors.native import facts
from lmcache_nvme_backend.doors.native.copies import as_rows, make_copier
from lmcache_nvme_backend.doors.native.engine import current_engine
from lmcache_nvme_backend.doors.native.idle import IdleManager, IdleWorker
from lmcache_nvme_backend.doors.native.layout import group_layouts
from lmcache_nvme_backend.doors.native.manager import NvmeOffloadingManager
from lmcache_nvme_backend.doors.native.releases import check_release, window_in_chunks
from lmcache_nvme_backend.doors.native.self_test import check_round_trip
from lmcache_nvme_backend.doors.native.settings import settings_of
from lmcache_nvme_backend.doors.native.shared_store import shared
from lmcache_nvme_backend.doors.native.staging import open_ring
from lmcache_nvme_backend.doors.native.worker import NvmeOffloadingWorker
from lmcache_nvme_backend.doors.store_opening import open_store
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.metrics import MetricsExporter
from lmcache_nvme_backend.settings import tier_names

logger = logging.getLogger("vllm.lmcache_nvme_backend")


class NvmeOffloadingSpec(OffloadingSpec):
    """`spec_name: NvmeOffloadingSpec`, `spec_module_path: lmcache_nvme_backend`.

    Raises (constructor):
        ConfigError: whatever a person can put right.
    """

    def __init__(self, config: Any) -> None:
        check_release()
        super().__init__(config)
        self._engine = current_engine()
        self._engine.spec = self
        self.settings = settings_of(self.extra_config)
        _check(self._engine.vllm_config, config)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        self.groups = [self._group(group) for group in config.groups]
        self._check_states()
        self.namespace = facts.namespace(self.settings, config, self._engine.vllm_config, self._engine.kv_cache_config)
        if any(group.window is not None for group in self.groups) and self.settings.admission == "second-sight":
            raise ConfigError(
                "admission", "second-sight with a hybrid model", "all, auto",
                "What is stored of a hybrid model is of use as a whole only. Remove it.",
            )  # fmt: skip

    def _group(self, group: Any) -> CacheGroup:
        spec = facts.first_spec(self._engine.kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec)
        tokens = group.tokens_per_block * self.blocks_per_chunk
        return CacheGroup(group.group_id, tokens // self.tokens_per_hash, window_in_chunks()(spec, tokens))

    def _check_states(self) -> None:
        """Raises `ConfigError` where no state would ever be stored: vLLM keeps one at few places, so of several blocks
        hardly all are there, and without its states nothing of a prompt can be loaded."""
        specs = [facts.first_spec(group.kv_cache_spec) for group in self._engine.kv_cache_config.kv_cache_groups]
        some = any(getattr(spec, "mamba_cache_mode", "all") != "all" for spec in specs)
        if some and self.blocks_per_chunk > 1:
            raise ConfigError(
                "blocks_per_chunk", f"{self.blocks_per_chunk} with a model that keeps states", "1",
                "Leave it out, and block_size as well: the blocks of such a model are large as they are.",
            )  # fmt: skip

    @property
    def _chunk_bytes(self) -> dict[int, int]:
        """A chunk's size by vLLM's number of its group, as far as the configuration tells."""
        sizes = {}
        for group in self.config.groups:
            spec = self._engine.kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
            layers = getattr(spec, "kv_cache_specs", None)
            block = spec.page_size_bytes if layers else spec.page_size_bytes * len(group.layer_names)
            sizes[group.group_id] = block * self.blocks_per_chunk
        return sizes

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._opened(self._make_manager, IdleManager)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._opened(lambda: self._make_worker(kv_caches), IdleWorker)
        return self._worker

    def _opened(self, make: Any, idle: Any) -> Any:
        try:
            with tier_names():
                return make()
        except ConfigError as e:
            if self.settings.on_init_error != "degrade":
                raise start.refuse(e) from e
            start.announce_degraded(e)
            return idle(self.config.parallel.rank)

    def _open_store(self, chunk_bytes: int) -> Any:
        hybrid = any(group.window is not None for group in self.groups)
        # In memory, numbers of a chunk have one size, but for a hybrid model's states.
        item = 1 if hybrid else self._engine.vllm_config.model_config.dtype.itemsize

        return shared(
            self.settings.path,
            self.namespace.digest,
            lambda: open_store(
                self.settings,
                self.namespace,
                chunk_bytes=chunk_bytes,
                item_sizes=(item,),
                policy=ORDER() if hybrid else None,
            ),
        )

    def _make_manager(self) -> NvmeOffloadingManager:
        store, give_back = self._open_store(max(self._chunk_bytes.values()))
        if warning := facts.random_seed_warning(self._engine.vllm_config):
            logger.warning("lmcache_nvme_backend: %s", warning)
        manager = NvmeOffloadingManager(store, self.groups, self._chunk_bytes, self.tokens_per_hash, give_back)
        manager.export()
        return manager

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> NvmeOffloadingWorker:
        layouts = group_layouts(kv_caches, self.blocks_per_chunk)
        tensors = [as_rows(cache.tensor) for cache in kv_caches.tensors]
        ring = open_ring(self.settings, max(layout.nbytes for layout in layouts), tensors[0].device.type)
        give_back = ring.close
        try:
            copier = make_copier(tensors)
            store, give_back = self._open_store(max(layout.nbytes for layout in layouts))
            if self.settings.self_test == "on":
                check_round_trip(store, ring, copier, layouts, tensors)
        except BaseException:
            give_back()
            ring.close()
            raise
        rank = self.config.parallel.rank

        def close() -> None:
            exporter.close()
            give_back()
            ring.close()

        worker = NvmeOffloadingWorker(
            store,
            ring,
            copier,
            layouts,
            [tokens * self.blocks_per_chunk for tokens in self.tokens_per_block],
            self.settings.io_threads,
            self.settings.store_wait_ms / 1000,
            close,
        )
        exporter = MetricsExporter(worker.values, rank)
        usage = store.usage()
        logger.info(
            "lmcache_nvme_backend: rank %d serves from %s: %d chunks in this namespace, %.2f of %.2f GiB used, "
            "staging %d slots in %d MiB",
            rank, store.directory, usage.namespace_chunks, usage.used_bytes / 2**30, usage.quota_bytes / 2**30,
            ring.slots, self.settings.staging_mib,
        )  # fmt: skip
        return worker


def _check(vllm_config: Any, config: Any) -> None:
    refusals.check_failure_policy(vllm_config.kv_transfer_config)
    if getattr(config, "canonical_layout", False):
        raise ConfigError(
            "canonical_layout", "true", "false with NvmeOffloadingSpec",
            "Blocks are stored as each rank has them. Remove it.",
        )  # fmt: skip
    refusals.check_model(vllm_config)
