"""The order in which chunks give up their room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from lmcache_nvme_backend.store.ghosts import Ghosts
from lmcache_nvme_backend.store.keys import ChunkKey

NO_STATES: Final[Mapping[ChunkKey, int]] = MappingProxyType({})


class EvictionPolicy(Protocol):
    """Ranks the chunks of one namespace. Called with the index's lock held: no method blocks or does I/O.

    Every key given to `touch` or `discard` has been added before. Removing nothing, and touching an empty sequence,
    are always safe. An iterator of `coldest` is valid until the next call of any other method.
    """

    # What the policy remembers of chunks that are not here, to be kept over a restart; None where it does not.
    ghosts: Ghosts | None

    def load(
        self,
        coldest_first: Iterable[ChunkKey],
        states: Mapping[ChunkKey, int] = NO_STATES,
        *,
        by_time: bool = False,
    ) -> None:
        """Forget everything and start with these, in this order. `states` is what `states()` told before the restart,
        in whole or in part; keys that are not loaded may be in it. `by_time`: the order is that of the last uses, and
        later news than the states."""

    def states(self) -> Mapping[ChunkKey, int]:
        """What shall be known of chunks after a restart beside their order: a number from 1 to 65535 each, for those
        that have one."""

    def ordered(self) -> Iterator[ChunkKey]:
        """All keys, the one unused for longest in front: what `load` takes with the `states` of the same moment."""

    def add(self, key: ChunkKey) -> None:
        """A chunk has just been stored."""

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        """These chunks, in the order of their prefix (head first), have been used, by a request that has asked for
        them before, or by storing what follows them."""

    def asked(self, keys: Sequence[ChunkKey], found: int) -> None:
        """A request asks for this prefix, whose first `found` chunks are here: a use of those."""

    def offered(self, key: ChunkKey) -> int:
        """A chunk that is not here could be stored: how often it was asked for before this time, as far as known."""

    def chance(self, key: ChunkKey) -> float:
        """How likely it would be asked for again before it had to give up its room; 1 where that is not known."""

    def discard(self, key: ChunkKey) -> None:
        """A chunk is gone."""

    def coldest(self) -> Iterator[ChunkKey]:
        """All keys, the one to evict first in front."""


class TailFirstLru:
    """Least recently used first; of chunks used together the tail of the prefix first.

    A use refreshes a prefix from its tail to its head, so that the head ends as the most recent: a chunk without its
    predecessors is never looked up.
    """

    ghosts: Ghosts | None = None

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def load(
        self,
        coldest_first: Iterable[ChunkKey],
        states: Mapping[ChunkKey, int] = NO_STATES,
        *,
        by_time: bool = False,
    ) -> None:
        self._order = OrderedDict.fromkeys(coldest_first)

    def states(self) -> Mapping[ChunkKey, int]:
        return NO_STATES

    def ordered(self) -> Iterator[ChunkKey]:
        return iter(self._order)

    def add(self, key: ChunkKey) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        refresh = self._order.move_to_end
        for key in reversed(prefix):
            refresh(key)

    def asked(self, keys: Sequence[ChunkKey], found: int) -> None:
        self.touch(keys[:found])

    def offered(self, key: ChunkKey) -> int:
        return 0

    def chance(self, key: ChunkKey) -> float:
        return 1.0

    def discard(self, key: ChunkKey) -> None:
        self._order.pop(key, None)

    def coldest(self) -> Iterator[ChunkKey]:
        return iter(self._order)
