"""Where the blocks of a KV cache group lie in a chunk's bytes.

A chunk of a group is, for each piece of memory that the group's layers have, the pages of its blocks in a row: with two
blocks a chunk, ``[piece 0: page 0, page 1][piece 1: page 0, page 1]…``. Pages are copied as they are, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """One tensor's part of a block: `page_bytes` of it, and where the first block's page lies in the chunk."""

    tensor: int
    page_bytes: int
    offset: int


class GroupLayout(msgspec.Struct, frozen=True):
    """One group's chunk: its pieces, how many blocks it has, and its size in bytes."""

    pieces: tuple[Piece, ...]
    blocks: int
    nbytes: int


class BlockRun(msgspec.Struct, frozen=True):
    """Blocks in a row, in the device's memory and in the chunk: `count` from device block `block` and from the
    chunk's block `at` on."""

    at: int
    block: int
    count: int


def group_layouts(kv_caches: Any, blocks_per_chunk: int) -> tuple[GroupLayout, ...]:
    """The layouts of vLLM's `CanonicalKVCaches`, in the order of its groups."""
    layouts = []
    for refs in kv_caches.group_data_refs:
        pages: dict[int, int] = {}  # layers that share their KV are one tensor
        for ref in refs:
            pages[ref.tensor_idx] = max(pages.get(ref.tensor_idx, 0), ref.page_size_bytes)
        pieces, offset = [], 0
        for tensor, page in pages.items():
            pieces.append(Piece(tensor, page, offset))
            offset += page * blocks_per_chunk
        layouts.append(GroupLayout(tuple(pieces), blocks_per_chunk, offset))
    return tuple(layouts)


class ChunkBlocks(msgspec.Struct, frozen=True):
    """A chunk's part in a transfer: its group, and which of its blocks lie where. `whole` where all of them do."""

    group: int
    runs: tuple[BlockRun, ...]
    whole: bool


def chunks_of(
    block_ids: Sequence[int], group_sizes: Sequence[int], block_indices: Sequence[int], blocks_per_chunk: int
) -> Iterator[ChunkBlocks]:
    """Cut vLLM's list of a transfer's blocks (`GPULoadStoreSpec`) into chunks.

    The first and the last chunk of a group may be there in part.
    """
    at = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        ids = block_ids[at : at + size]
        at += size
        done = 0
        while done < size:
            inside = (first + done) % blocks_per_chunk
            count = min(blocks_per_chunk - inside, size - done)
            yield ChunkBlocks(group, tuple(_runs(ids[done : done + count], inside)), count == blocks_per_chunk)
            done += count


def stored_chunks_of(
    block_ids: Sequence[int],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_counts: Sequence[int],
    blocks_per_chunk: int,
) -> Iterator[ChunkBlocks]:
    """The same for a store, of which the number of chunks is known for each group.

    vLLM leaves blocks out that a sliding window has left behind, and does not say which. Missing ones at the head leave
    the first chunk in part. Where others are missing, no block of the group has a certain place: none of its chunks is
    whole then.
    """
    at = 0
    for group, (size, first, count) in enumerate(zip(group_sizes, block_indices, chunk_counts, strict=True)):
        if first % blocks_per_chunk + size == count * blocks_per_chunk:
            for chunk in chunks_of(block_ids[at : at + size], [size], [first], blocks_per_chunk):
                yield ChunkBlocks(group, chunk.runs, chunk.whole)
        else:
            yield from (ChunkBlocks(group, (), False) for _ in range(count))
        at += size


def _runs(ids: Sequence[int], inside: int) -> Iterator[BlockRun]:
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield BlockRun(inside + start, int(ids[start]), i - start)
            start = i
