"""A chunk of every group through the tier and back, before the first request.

The device's blocks hold no request yet; those that are used here get their content back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from lmcache_nvme_backend.doors.native.copies import Copier
from lmcache_nvme_backend.doors.native.layout import BlockRun, GroupLayout
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.staging import Slot, StagingRing
from lmcache_nvme_backend.store import ChunkStore, Hit, digest_fields

logger = logging.getLogger("vllm.lmcache_nvme_backend")


def check_round_trip(
    store: ChunkStore,
    ring: StagingRing,
    copier: Copier,
    layouts: Sequence[GroupLayout],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Raises `ConfigError` where a chunk does not come back as it was.

    A chunk that cannot be stored now (the disk is full of what is in use, the write budget is spent) proves nothing.
    """
    for group, layout in enumerate(layouts):
        if tensors[0].shape[0] <= 2 * layout.blocks:
            logger.warning("lmcache_nvme_backend: no self-test: the KV pool has no room for two chunks")
            return
        slot = ring.acquire()
        assert slot is not None, "nothing else has begun"
        try:
            _check(store, copier, layout, tensors, slot, group)
        finally:
            ring.release(slot)


def _check(
    store: ChunkStore, copier: Copier, layout: GroupLayout, tensors: Sequence[torch.Tensor], slot: Slot, group: int
) -> None:
    # Block 0 is vLLM's null block.
    source, target = (BlockRun(0, 1, layout.blocks),), (BlockRun(0, 1 + layout.blocks, layout.blocks),)
    there, back = slice(1, 1 + layout.blocks), slice(1 + layout.blocks, 1 + 2 * layout.blocks)
    used = slice(1, 1 + 2 * layout.blocks)
    key = digest_fields("self-test", os.urandom(16), group)
    before = [tensors[piece.tensor][used].clone() for piece in layout.pieces]
    try:
        for piece in layout.pieces:
            rows = tensors[piece.tensor][there, : piece.page_bytes]
            rows.copy_(torch.randint(-128, 128, rows.shape, dtype=torch.int8))
        mark = copier.mark()
        copier.to_slot(slot, layout, source, mark)
        result = store.put(key, slot.view[: layout.nbytes], depth=0)
        if not result.kept:
            logger.warning("lmcache_nvme_backend: no self-test: a chunk cannot be stored now: %s", result.value)
            return
        slot.view[: layout.nbytes] = bytes(layout.nbytes)
        found = store.get(key, slot.view)
        if not isinstance(found, Hit) or found.nbytes != layout.nbytes:
            raise _refusal(group, f"could not be read: {getattr(getattr(found, 'cause', None), 'value', 'other size')}")
        copier.to_device(slot, layout, target, mark)
        for piece in layout.pieces:
            tensor = tensors[piece.tensor][:, : piece.page_bytes]
            if not torch.equal(tensor[there], tensor[back]):
                raise _refusal(group, "came back with other bytes")
    finally:
        for piece, rows in zip(layout.pieces, before):
            tensors[piece.tensor][used].copy_(rows)
        store.remove(key)


def _refusal(group: int, what: Any) -> ConfigError:
    return ConfigError(
        "nvme.self_test", f"a chunk of group {group} that {what}", "chunks that come back as they were",
        "Check the disk. Set self_test: off to start all the same: every chunk's checksum is still verified.",
    )  # fmt: skip
