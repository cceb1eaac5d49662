"""Which objects are here: answered for whole prefixes, in the order that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmcache_nvme_backend.doors.mp.objects import Layout, layout_of
from lmcache_nvme_backend.doors.mp.spaces import Chunk, Spaces


class Found(msgspec.Struct):
    """The answer to one lookup. `chunks[i]` is None for an object that may not be served; `here[i]`: it is in this
    store, and pinned."""

    chunks: list[Chunk | None]
    here: list[bool]
    nbytes: dict[int, int]  # of an object, by its group


class Lookups:
    """Thread-safe."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def run(self, keys: Sequence[Any], group_layouts: Mapping[int, Any]) -> Found:
        """`keys` is a request's, each prefix of a rank and object group head first; `group_layouts` has LMCache's
        description of each group."""
        layouts = {group: layout_of(desc.shapes, desc.dtypes) for group, desc in group_layouts.items()}
        nbytes = {group: layout.nbytes for group, layout in layouts.items()}
        found = Found([None] * len(keys), [False] * len(keys), nbytes)
        for row in _rows(keys):
            layout = layouts.get(keys[row[0]].object_group_id)
            self._look(keys, row, layout, found)
        return found

    def _look(self, keys: Sequence[Any], row: Sequence[int], layout: Layout | None, found: Found) -> None:
        chunks = [self._spaces.chunk(keys[i], layout) for i in row]
        head = chunks[0]
        if head is None or any(chunk is None for chunk in chunks):
            return
        space, names = head.space, [chunk.name for chunk in chunks if chunk is not None]
        if before := space.book.note(names):
            space.store.match(before, again=True)  # in LMCache's memory, and without them the rest is of no use
        depth, _ = space.book.place(names[0])
        count = space.store.match(names, pin=True, depths=range(depth, depth + len(names)))
        # LMCache may hold in its memory what is missing here, so what lies behind a gap counts as well.
        here = [i < count or space.store.pin(name) for i, name in enumerate(names)]
        space.pins.taken([name for name, is_here in zip(names, here, strict=True) if is_here])
        space.lookups.add("hit", sum(here))
        space.lookups.add("missed", len(here) - sum(here))
        for i, chunk, is_here in zip(row, chunks, here, strict=True):
            found.chunks[i], found.here[i] = chunk, is_here


def _rows(keys: Sequence[Any]) -> list[list[int]]:
    """Indices of the keys of each prefix: a prefix has one model, rank, object group and salt."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), []).append(i)
    return list(rows.values())
