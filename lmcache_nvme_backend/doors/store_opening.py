"""The store behind a door: a user's settings and a namespace in, an open chunk store out."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings
from lmcache_nvme_backend.store.format import BLOCK, blocks_of
from lmcache_nvme_backend.store.policy import EvictionPolicy
from lmcache_nvme_backend.store.write_budget import BURST

logger = logging.getLogger("vllm.lmcache_nvme_backend")


def open_store(
    s: NvmeSettings,
    namespace: Namespace,
    *,
    chunk_bytes: int,
    item_sizes: Collection[int],
    ranks: int = 1,
    policy: EvictionPolicy | None = None,
) -> ChunkStore:
    """Open the namespace; what is odd about it goes to the log. Raises `ConfigError`.

    Args:
        chunk_bytes: the largest payload that will be stored.
        item_sizes: bytes of one number, for each type of numbers in the chunks; the codec goes by it.
        ranks: how many ranks must each have a chunk for it to be of use.
        policy: the order of eviction, where it is not the store's own.
    """
    _check_budget(s, chunk_bytes)
    sixteen_bit = all(size == 2 for size in item_sizes)
    store = ChunkStore.open(
        Path(s.path),
        namespace,
        StoreSettings(
            quota_bytes=s.quota_bytes,
            direct_io=s.direct_io,
            fsync=s.fsync,
            codec="zstd-split" if s.codec == "zstd" and sixteen_bit else s.codec,
            lock_wait_s=s.lock_wait_s,
            # What `auto` has learned differs a little from rank to rank, and a chunk is of use only where all ranks
            # have it.
            admission="all" if s.admission == "auto" and ranks > 1 else s.admission,
            write_budget_bytes_per_day=s.write_budget_bytes_per_day,
        ),
        policy,
    )
    for warning in store.warnings:
        logger.warning("lmcache_nvme_backend: %s", warning)
    return store


def _check_budget(s: NvmeSettings, chunk_bytes: int) -> None:
    """A budget of which no chunk can ever be had would store nothing, without a word."""
    least = BURST * blocks_of(chunk_bytes) * BLOCK
    if s.write_budget_gib_per_day > 0 and s.write_budget_bytes_per_day < least:
        raise ConfigError(
            "nvme.write_budget_gib_per_day",
            f"{s.write_budget_gib_per_day:g} GiB with chunks of {chunk_bytes / 2**20:.1f} MiB",
            f"0 for none, or {BURST} chunks at least: a {BURST}th part may come at once",
            f"Set it to {math.ceil(least / 2**30 * 1000) / 1000:g} or more.",
        )
