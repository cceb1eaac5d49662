"""The order in which chunks give up their room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import takewhile
from types import MappingProxyType
from typing import Final, Protocol

from lmcache_nvme_backend.store.ghosts import Ghosts
from lmcache_nvme_backend.store.keys import ChunkKey

NO_STATES: Final[Mapping[ChunkKey, int]] = MappingProxyType({})

Frozen = Callable[[], tuple[Iterator[ChunkKey], Mapping[ChunkKey, int]]]
Install = Callable[[Iterable[ChunkKey], Set[ChunkKey]], None]


class EvictionPolicy(Protocol):
    """Ranks the chunks of one namespace. Called with the index's lock held, but for `ranked`: no method blocks or does
    I/O, and none but `load` takes longer than a lookup may wait.

    Every key given to `touch` or `discard` has been added before. Removing nothing, and touching an empty sequence,
    are always safe. An iterator of `coldest` is valid until the next call of any other method.
    """

    # What the policy remembers of chunks that are not here, to be kept over a restart; None where it does not.
    ghosts: Ghosts | None

    def load(self, coldest_first: Sequence[ChunkKey], states: Sequence[int] = ()) -> None:
        """Forget everything and start with these, in this order. `states` has the number of `frozen` before the restart
        for each, 0 where none is known; it is empty where that is so of all."""

    def frozen(self) -> Frozen:
        """What `load` and `ranked` take, as of this moment. What is returned does the work, and is called without the
        lock: the order, the one unused for longest in front, and for those that have one a number from 1 to 65535 that
        shall be known after a restart. Chunks that are used or go in between may be told as they are then."""

    def ranked(self, coldest_first: Iterable[ChunkKey], states: Mapping[ChunkKey, int]) -> Install:
        """Work out another order, by the times of the last uses, which is later news than the states: called without
        the lock. What is returned puts it in place, with the lock held: given keys that have gone meanwhile, and all
        that have been added or used since `load`, which stay as they are and are more recent than all others."""

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

    def load(self, coldest_first: Sequence[ChunkKey], states: Sequence[int] = ()) -> None:
        self._order = OrderedDict.fromkeys(coldest_first)

    def frozen(self) -> Frozen:
        order = list(self._order)
        return lambda: (iter(order), NO_STATES)

    def ranked(self, coldest_first: Iterable[ChunkKey], states: Mapping[ChunkKey, int]) -> Install:
        order = OrderedDict.fromkeys(coldest_first)

        def install(gone: Iterable[ChunkKey], recent: Set[ChunkKey]) -> None:
            for key in gone:
                order.pop(key, None)
            for key in reversed(list(takewhile(recent.__contains__, reversed(self._order)))):
                order[key] = None
                order.move_to_end(key)
            self._order = order

        return install

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
