"""The connector LMCache lacks: between chunks and vLLM's paged KV on a CPU.

vLLM's CPU attention packs K and V inside a block in a form that depends on the instruction set, so this copies whole
blocks as opaque bytes, and the packing is a fact of the namespace (``identity``). A chunk is a whole number of blocks.

A chunk's memory has LMCache's shape ``[2, layers, tokens, hidden]`` (MLA: ``[1, …]``) and is used as
``[layers, blocks of the chunk, bytes a block]``, which is the same number of bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

from lmcache_nvme_backend.errors import ConfigError


class CpuBlockConnector(GPUConnectorInterface):
    """Copies chunks to and from vLLM's CPU blocks, in the calling thread."""

    def __init__(self, metadata: Any) -> None:
        layers, kv_size, _, heads, head_size = metadata.kv_shape
        self._shape = (kv_size, layers, heads * head_size)
        self._rows: list[torch.Tensor] = []
        self._caches: list[torch.Tensor] = []

    def get_shape(self, num_tokens: int) -> torch.Size:
        kv_size, layers, hidden = self._shape
        return torch.Size([kv_size, layers, num_tokens, hidden])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Blocks of tokens ``start`` to ``end`` → the chunk."""
        rows, blocks, _ = self._span(start, end, kwargs)
        chunk = self._chunk_rows(memory_obj, rows, len(blocks))
        for layer, row in enumerate(rows):
            torch.index_select(row, 0, blocks, out=chunk[layer])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """The chunk → blocks of tokens ``start`` to ``end``, leaving alone those that vLLM already holds."""
        rows, blocks, block_tokens = self._span(start, end, kwargs)
        chunk = self._chunk_rows(memory_obj, rows, len(blocks))
        held = max(0, int(kwargs.get("vllm_cached_tokens", 0)) - start)
        skip = min(len(blocks), -(-held // block_tokens))
        # torch's index_copy_ moves bytes one by one (0.2 GB/s); numpy moves a block at a time (11 GB/s).
        places = blocks[skip:].numpy()
        for layer, row in enumerate(rows):
            row.numpy()[places] = chunk[layer, skip:].numpy()

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def _span(self, start: int, end: int, kwargs: Any) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        caches = kwargs["kvcaches"]
        if len(caches) != len(self._caches) or any(a is not b for a, b in zip(caches, self._caches, strict=True)):
            self._rows, self._caches = _widest([_block_rows(kv) for kv in caches]), list(caches)
        slots = kwargs["slot_mapping"][start:end]
        block_tokens = _block_tokens(self._rows[0], caches[0], self._shape)
        firsts = slots[::block_tokens]
        if (end - start) % block_tokens or bool((firsts % block_tokens).any()):
            raise ValueError(f"tokens {start} to {end} are not whole blocks of {block_tokens}")
        return self._rows, torch.div(firsts, block_tokens, rounding_mode="floor"), block_tokens

    @staticmethod
    def _chunk_rows(memory_obj: Any, rows: list[torch.Tensor], blocks: int) -> torch.Tensor:
        tensor = memory_obj.tensor
        if tensor is None:
            raise ValueError("the chunk has no memory")
        return tensor.view(torch.uint8).reshape(-1).view(rows[0].dtype).view(len(rows), blocks, rows[0].shape[1])


def _block_rows(kv: torch.Tensor) -> torch.Tensor:
    """A layer's KV as ``[blocks, bytes a block]`` without copying, whatever order its inner dimensions have."""
    inner = sorted(range(1, kv.dim()), key=kv.stride, reverse=True)
    ordered = kv.permute(0, *inner)
    if not ordered[0].is_contiguous():
        raise ValueError(f"a KV block of shape {tuple(kv.shape)} and strides {kv.stride()} is not one piece of memory")
    elements = ordered[0].numel()
    return torch.as_strided(ordered, (kv.shape[0], elements), (kv.stride(0), 1)).view(torch.uint8)


def _widest(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory in words of eight bytes where all of it fits: torch selects them a fifth faster than bytes."""
    odd = any(row.shape[1] % 8 or row.stride(0) % 8 or row.storage_offset() % 8 or row.data_ptr() % 8 for row in rows)
    return rows if odd else [row.view(torch.int64) for row in rows]


def _block_tokens(row: torch.Tensor, kv: torch.Tensor, shape: tuple[int, int, int]) -> int:
    kv_size, _, hidden = shape
    token_bytes = kv_size * hidden * kv.element_size()
    block_bytes = row.shape[1] * row.element_size()
    if block_bytes % token_bytes:
        raise ValueError(f"a block of {block_bytes} bytes is not a whole number of tokens of {token_bytes} bytes")
    return int(block_bytes // token_bytes)


def check_cpu_layout(config: Any, vllm_config: Any) -> None:
    """Refuse what whole-block copies cannot carry.

    Raises:
        ConfigError: the chunk is not a whole number of blocks, or partial chunks are to be saved.
    """
    block, chunk = vllm_config.cache_config.block_size, config.chunk_size
    if chunk % block:
        raise ConfigError(
            "chunk_size", f"{chunk} tokens with a KV block of {block}", f"a multiple of {block}",
            "Set chunk_size in the LMCache configuration, or vLLM's --block-size.",
        )  # fmt: skip
    if config.save_unfull_chunk:
        raise ConfigError(
            "save_unfull_chunk", "true", "false on a CPU, where blocks are copied whole",
            "Remove it from the LMCache configuration.",
        )  # fmt: skip
