"""Before the first request: does a chunk come back from the tier as it went in?

How vLLM lays out its paged KV changes between releases and attention backends, and a connector that reads it wrongly
mixes up blocks, layers or planes without an error. So one chunk of noise, in blocks that do not follow each other, goes
the whole way (blocks → connector → staging → disk → staging → connector → other blocks), and every byte around it is
compared. It runs while vLLM's pool is still empty, and leaves it as it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from lmcache_nvme_backend.doors.lmcache_memory import SlotMemoryObj
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkStore, Hit, PutResult, digest_fields

logger = logging.getLogger("vllm.lmcache_nvme_backend")

# vLLM never gives block 0 to a request: it is what padding points at.
FIRST_BLOCK = 1


def check_round_trip(
    connector: Any, backend: Any, kv_caches: Sequence[torch.Tensor], num_blocks: int | None, block_tokens: int
) -> None:
    """Carry one chunk through the tier and compare.

    Args:
        connector: LMCache's, as its engine uses it.
        backend: an ``NvmeBackend``, for its memory and its store.
        kv_caches: every layer's paged KV, with a dimension of ``num_blocks`` (or a multiple, where the kernel's blocks
            are smaller than vLLM's) first or second.
        num_blocks: vLLM's blocks, of ``block_tokens`` tokens each; ``None`` where this vLLM does not tell.

    Raises:
        ConfigError: what came back is not what went in, or the layout is one that cannot be checked.
    """
    tokens = backend.metadata.chunk_size
    blocks = -(-tokens // block_tokens)
    # Layers that share their KV, as in Gemma 3n, are named one by one and are one tensor.
    layers = [_Layer(kv, num_blocks, block_tokens) for kv in {kv.data_ptr(): kv for kv in kv_caches}.values()]
    window = range(FIRST_BLOCK, min(FIRST_BLOCK + 4 * blocks, min(layer.blocks for layer in layers)))
    if len(window) < 2 * blocks:
        logger.warning("lmcache_nvme_backend: self-test left out: a pool of %d blocks is too small for it", len(window))
        return
    source, target = _apart(window, blocks)
    before = [layer.read(window) for layer in layers]
    try:
        expected = [layer.fill(window, seed) for seed, layer in enumerate(layers)]
        for rows in expected:
            for old, new in zip(source, target, strict=True):
                rows[new - window.start] = rows[old - window.start]
        through_disk = _carry(connector, backend, kv_caches, _slots(source, block_tokens, tokens),
                              _slots(target, block_tokens, tokens))  # fmt: skip
        _compare(layers, expected, window, target, type(connector).__name__)
    finally:
        for layer, rows in zip(layers, before, strict=True):
            layer.write(window, rows)
    logger.info(
        "lmcache_nvme_backend: self-test passed: a chunk of %d tokens in %d layers came back byte for byte%s",
        tokens, len(layers), "" if through_disk else " (through memory alone: the disk did not take it)",
    )  # fmt: skip


class _Layer:
    """One layer's paged KV by vLLM's blocks, as bytes."""

    def __init__(self, kv: torch.Tensor, num_blocks: int | None, block_tokens: int) -> None:
        if num_blocks is None:
            # K and V apart come first; whatever else, the blocks do.
            num_blocks = kv.shape[1] if kv.dim() == 5 and kv.shape[0] == 2 else kv.shape[0]
        for dim in (0, 1):
            per_block, rest = divmod(kv.shape[dim], num_blocks)
            if per_block and not rest and block_tokens % per_block == 0:
                self._rows, self._per_block, self.blocks = kv.movedim(dim, 0), per_block, num_blocks
                return
        raise ConfigError(
            "nvme.self_test", f"KV of shape {tuple(kv.shape)}, in which {num_blocks} blocks cannot be told apart",
            "a layout whose first or second dimension counts blocks",
            "This vLLM is not known here: report it. nvme.self_test: off starts without this check.",
        )  # fmt: skip

    def _of(self, block: int) -> torch.Tensor:
        return self._rows[block * self._per_block : (block + 1) * self._per_block]

    def read(self, window: range) -> torch.Tensor:
        """Bytes of the window's blocks, ``[blocks, bytes a block]``, on the CPU."""
        whole = self._of(window.start).new_empty((len(window), *self._of(window.start).shape))
        for row, block in enumerate(window):
            whole[row].copy_(self._of(block))
        return whole.cpu().view(torch.uint8).reshape(len(window), -1)

    def write(self, window: range, rows: torch.Tensor) -> None:
        shape = self._of(window.start).shape
        for row, block in zip(rows, window, strict=True):
            self._of(block).copy_(row.view(self._rows.dtype).reshape(shape))

    def fill(self, window: range, seed: int) -> torch.Tensor:
        """Write noise that no other layer, plane or token shares; what was written, as ``read`` gives it."""
        noise = torch.randint(
            0, 256, self.read(window).shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed + 1)
        )
        self.write(window, noise)
        return noise


def _apart(window: range, blocks: int) -> tuple[list[int], list[int]]:
    """Two sets of blocks in which no block follows its predecessor: every second one, backwards; the others, turned."""
    source = list(reversed(window[0::2][:blocks]))
    rest = list(window[1::2][:blocks])
    return source, rest[len(rest) // 2 :] + rest[: len(rest) // 2]


def _slots(blocks: Sequence[int], block_tokens: int, tokens: int) -> torch.Tensor:
    firsts = torch.tensor(blocks, dtype=torch.int64)[:, None] * block_tokens
    return (firsts + torch.arange(block_tokens)[None]).flatten()[:tokens]


def _carry(
    connector: Any, backend: Any, kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> bool:
    """Blocks to blocks through the tier, with the calls that LMCache makes; whether the disk took part."""
    device, tokens = kv_caches[0].device, backend.metadata.chunk_size
    shapes, dtypes = backend.metadata.get_shapes(tokens), backend.metadata.get_dtypes()
    caches = list(kv_caches)
    objs = [backend.allocate(shapes, dtypes, backend.loader.chunk_format) for _ in range(2)]
    try:
        if None in objs:
            raise ConfigError("nvme.staging_mib", "no room for two chunks", "at least two", "Raise it.")
        out, back = objs
        connector.batched_from_gpu([out], [0], [tokens], kvcaches=caches, slot_mapping=source.to(device))
        _finish(device)
        through_disk = _through_disk(backend.store, _bytes(out), _bytes(back))
        if not through_disk:
            _bytes(back)[:] = _bytes(out)
        connector.batched_to_gpu(
            [back], [0], [tokens], kvcaches=caches, slot_mapping=target.to(device), vllm_cached_tokens=0
        )
        _finish(device)
        return through_disk
    finally:
        for obj in objs:
            if obj is not None:
                obj.ref_count_down()


def _bytes(obj: Any) -> memoryview:
    view = obj.payload() if isinstance(obj, SlotMemoryObj) else obj.byte_array
    return memoryview(view).cast("B")[: obj.get_size()]


def _through_disk(store: ChunkStore, out: memoryview, back: memoryview) -> bool:
    """Whether the store took the chunk; it then gave it back, and keeps nothing."""
    key = digest_fields("self-test", os.getpid(), os.urandom(8).hex())
    if store.put(key, out, depth=0) is not PutResult.STORED:
        return False
    try:
        result = store.get(key, back)
        if not isinstance(result, Hit):
            # Every load is checked like this one, so it is no reason not to serve; but a person should know.
            logger.warning(
                "lmcache_nvme_backend: self-test: the disk did not give its chunk back: %s", result.cause.value
            )
        return isinstance(result, Hit)
    finally:
        store.remove(key)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _compare(
    layers: Sequence[_Layer], expected: Sequence[torch.Tensor], window: range, target: Sequence[int], connector: str
) -> None:
    for number, (layer, rows) in enumerate(zip(layers, expected, strict=True)):
        wrong = (layer.read(window) != rows).any(dim=1).nonzero().flatten().tolist()
        if not wrong:
            continue
        strayed = [window[row] for row in wrong if window[row] not in target]
        what = f"blocks {strayed} were overwritten that belong to nobody" if strayed else "other bytes came back"
        raise ConfigError(
            "nvme.self_test", f"{connector} does not restore what it saved: in layer {number} of {len(layers)}, {what}",
            "a connector that knows how this vLLM lays out its KV",
            "Serving would give wrong answers. Use another attention backend, or other releases of vLLM and LMCache; "
            "report these.",
        )  # fmt: skip
