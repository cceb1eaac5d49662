"""Where a chunk stands in its prefix: a lookup names a whole prefix in order, a store only what is new."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from lmcache_nvme_backend.store import ChunkKey

# Chunks remembered, some 200 bytes each: 16 million tokens of chunks of 256.
_REMEMBERED = 65_536
# Of a chunk that no lookup has named, the answer to a prompt: behind everything, so that it goes before any prompt.
UNKNOWN_DEPTH = 1 << 20


class PrefixBook:
    """Thread-safe. What it forgets, or never knew, costs only order of eviction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[ChunkKey, tuple[int, ChunkKey | None]] = OrderedDict()

    def note(self, row: Sequence[ChunkKey]) -> list[ChunkKey]:
        """`row` is a prefix, head first, or the rest of one whose head LMCache holds in its memory: then it goes on
        where its first chunk is known to stand. Returns the chunks before it, head first."""
        with self._lock:
            depth, parent = self._places.get(row[0], (0, None))
            before = self._ancestors(parent)
            for key in row:
                self._places[key] = (depth, parent)
                self._places.move_to_end(key)
                depth, parent = depth + 1, key
            while len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
        return before

    def _ancestors(self, key: ChunkKey | None) -> list[ChunkKey]:
        found: list[ChunkKey] = []
        while key is not None and key in self._places and len(found) < _REMEMBERED:
            found.append(key)
            key = self._places[key][1]
        return found[::-1]

    def place(self, key: ChunkKey) -> tuple[int, ChunkKey | None]:
        """Its depth and the key right before it."""
        with self._lock:
            return self._places.get(key, (UNKNOWN_DEPTH, None))
