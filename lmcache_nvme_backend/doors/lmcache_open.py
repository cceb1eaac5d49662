"""What the LMCache plugin opens at its start: the staging ring and the chunk store, or one error that says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lmcache_nvme_backend.doors import refusals, store_opening, vllm_plugin
from lmcache_nvme_backend.doors.identity import namespace_facts, random_seed_warning
from lmcache_nvme_backend.doors.lmcache_memory import RingAllocator, device_memory, size_of
from lmcache_nvme_backend.doors.vllm_facts import model_name
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.staging import StagingRing
from lmcache_nvme_backend.store import ChunkStore, Namespace

logger = logging.getLogger("vllm.lmcache_nvme_backend")

# What has been opened, to be closed in reverse order where the start fails.
Opened = list[Callable[[], None]]


def check_engine(config: Any, vllm_config: Any) -> None:
    """Raises `ConfigError` where this vLLM cannot be served."""
    refusals.check_vllm(vllm_config)
    if not vllm_plugin.registered():
        raise ConfigError(
            "VLLM_PLUGINS", "a list without lmcache_nvme_backend", "a list with it, or the variable unset",
            "vLLM's scheduler process must load the plugin, or chunks would be shared between LoRA adapters and "
            "between cache_salts.",
        )  # fmt: skip
    if str(vllm_config.device_config.device_type) == "cpu":
        from lmcache_nvme_backend.doors.cpu_connector import check_cpu_layout

        check_cpu_layout(config, vllm_config)


def open_ring(settings: NvmeSettings, chunk_bytes: int, device: str, opened: Opened) -> RingAllocator:
    """The rank's ring, with slots for chunks of `chunk_bytes`. Raises `ConfigError` where two do not fit, or where the
    device cannot pin them."""
    memory = device_memory(settings.staging_bytes)
    opened.append(memory.close)
    ring = StagingRing(memory, chunk_bytes, device_memory)
    if ring.slots < 2:
        raise ConfigError(
            "nvme.staging_mib", f"{settings.staging_mib} MiB with chunks of {chunk_bytes / 2**20:.1f} MiB",
            "at least two chunks", f"Set it to {-(-2 * ring.slot_bytes // 2**20)} or more.",
        )  # fmt: skip
    if device != "cpu" and not ring.pinned:
        raise ConfigError(
            "nvme.staging_mib", f"{settings.staging_mib} MiB that {device} cannot pin",
            "host memory that can be registered with the device",
            "Lower it, or raise the locked-memory limit (ulimit -l).",
        )  # fmt: skip
    allocator = RingAllocator(ring)
    opened.append(allocator.close)
    return allocator


def open_store(s: NvmeSettings, config: Any, metadata: Any, vllm_config: Any | None, opened: Opened) -> ChunkStore:
    """The store of this rank's namespace; what is odd about it goes to the log. Raises `ConfigError`."""
    namespace = Namespace(
        namespace_facts(s, config, metadata, vllm_config), {"model_name": model_name(metadata.model_name, vllm_config)}
    )
    store = store_opening.open_store(
        s,
        namespace,
        chunk_bytes=size_of(metadata.get_shapes(metadata.chunk_size), metadata.get_dtypes()),
        item_sizes=[dtype.itemsize for dtype in metadata.get_dtypes()],
        ranks=metadata.world_size,
    )
    opened.append(store.close)
    if seed := random_seed_warning(config):
        logger.warning("lmcache_nvme_backend: %s", seed)
    return store
