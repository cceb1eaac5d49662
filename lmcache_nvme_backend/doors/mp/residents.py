"""Which objects of LMCache's are known to lie here, with their sizes: for its usage reports and quotas.

LMCache counts bytes by `cache_salt` from what it is told is stored and deleted. The chunk store evicts by itself and
keeps chunks over a restart, so both are told here: an old chunk when it is first found, an evicted one at the next
look.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final

from lmcache_nvme_backend.doors.mp.spaces import Chunk, Space

# A look is due when as many are known again as the last one left, and this many: else nobody who asks for no usage
# would ever have the evicted ones forgotten, some 500 bytes each.
LOOK_AFTER: Final = 10_000


class Residents:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Any, tuple[Chunk, int]] = {}  # by ObjectKey: chunk and bytes
        self._seen: list[tuple[int, int]] = []
        self._look_at = LOOK_AFTER

    @property
    def look_is_due(self) -> bool:
        return len(self._known) >= self._look_at

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
        """Forget what the stores have removed since the last look, and what lies in a space that is closed; key and
        bytes of each. A look that finds nothing removed costs nothing."""
        seen = [(id(space), _removals(space)) for space in spaces]
        with self._lock:
            known = list(self._known.items()) if seen != self._seen else []
            self._seen = seen
        gone = self.drop([key for key, (chunk, _) in known if not _is_here(chunk)])
        self._look_at = 2 * len(self._known) + LOOK_AFTER
        return gone


def _removals(space: Space) -> int:
    stats = space.store.stats
    return int(stats.evictions + sum(stats.misses.values()))


def _is_here(chunk: Chunk) -> bool:
    """Without making it more recent. What a store that stands aside has, nobody can know."""
    space = chunk.space
    return not space.closed and (space.store.stands_aside or space.store.known(chunk.name))
