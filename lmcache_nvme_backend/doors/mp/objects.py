"""The server's objects as chunks: their layout, their names and their bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lmcache_nvme_backend.store import ChunkKey, digest_fields
from lmcache_nvme_backend.store.direct_io import as_bytes

# A hash below this length is LMCache's `builtin`: 64 bits, seeded anew in every process, and easy to collide.
LEAST_HASH_BYTES: Final = 16


# How long an object's memory is surely LMCache's to lend: its own locks on it end after 300 s for reads and 600 s for
# writes (`read_ttl_seconds`, `write_ttl_seconds`), and then the memory may hold another object.
LENT_S: Final = 240.0


class Lease:
    """The time for which the memory of one task's objects may be touched, from the task's submission on."""

    def __init__(self) -> None:
        self._until = time.monotonic() + LENT_S

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until


class Layout(msgspec.Struct, frozen=True):
    """Shapes and types of an object's tensors, as text, and its size."""

    text: str
    nbytes: int
    item_sizes: tuple[int, ...]


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
    """`shapes` and `dtypes` are torch's, one each a tensor."""
    parts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return Layout(";".join(parts), nbytes, tuple(dtype.itemsize for dtype in dtypes))


def layout_of_object(obj: Any) -> Layout | None:
    """The layout of one of LMCache's memory objects. None for one that holds a serializer's output: its bytes are of a
    form that a lookup, which knows the KV's layout alone, could not tell from the KV's own."""
    shapes, dtypes = obj.get_shapes(), obj.get_dtypes()
    if any(len(shape) < 2 for shape in shapes):
        return None
    layout = layout_of(shapes, dtypes)
    return layout if obj.get_size() == layout.nbytes else None


def chunk_key(key: Any, layout: Layout) -> ChunkKey | None:
    """The name of an `ObjectKey` in its model's namespace; None where its hash is too weak to name anything."""
    if len(key.chunk_hash) < LEAST_HASH_BYTES:
        return None
    return digest_fields("mp", key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt, layout.text)


def ranks_of(key: Any) -> int:
    """How many ranks hold a part of each chunk: LMCache packs it into the rank's number."""
    return max(1, int(key.kv_rank) >> 24 & 0xFF)


def bytes_of(obj: Any) -> memoryview:
    """The object's bytes, without a copy; valid as long as LMCache leaves them to us."""
    return as_bytes(memoryview(obj.byte_array))
