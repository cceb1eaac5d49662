"""Which objects of LMCache's are known to lie here, with their sizes: for its usage reports and quotas.

LMCache counts bytes by `cache_salt` from what it is told is stored and deleted. The chunk store evicts by itself and
keeps chunks over a restart, so both are told here: an old chunk when it is first found, an evicted one at the next
look.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from lmcache_nvme_backend.doors.mp.spaces import Chunk, Space


class Residents:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Any, tuple[Chunk, int]] = {}  # by ObjectKey: chunk and bytes
        self._seen = -1

    def add(self, arrivals: Iterable[tuple[Any, Chunk, int]]) -> list[tuple[Any, int]]:
        """Key and bytes of those that were not known."""
        new = []
        with self._lock:
            for key, chunk, nbytes in arrivals:
                if key not in self._known:
                    new.append((key, nbytes))
                self._known[key] = (chunk, nbytes)
        return new

    def chunk(self, key: Any) -> Chunk | None:
        with self._lock:
            known = self._known.get(key)
        return known[0] if known is not None else None

    def drop(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """Key and bytes of those that were known."""
        gone = []
        with self._lock:
            for key in keys:
                known = self._known.pop(key, None)
                if known is not None:
                    gone.append((key, known[1]))
        return gone

    def gone(self, spaces: Iterable[Space]) -> list[tuple[Any, int]]:
        """Forget what the stores have removed since the last look; key and bytes of each. A look that finds nothing
        removed costs nothing."""
        removed = sum(_removals(space) for space in spaces)
        with self._lock:
            if removed == self._seen:
                return []
            self._seen = removed
            known = list(self._known.items())
        return self.drop([key for key, (chunk, _) in known if not _is_here(chunk)])


def _removals(space: Space) -> int:
    stats = space.store.stats
    return int(stats.evictions + sum(stats.misses.values()))


def _is_here(chunk: Chunk) -> bool:
    """Without making it more recent."""
    store = chunk.space.store
    if store.stands_aside:
        return True  # nobody can know
    if not store.pin(chunk.name):
        return False
    store.unpin(chunk.name)
    return True
