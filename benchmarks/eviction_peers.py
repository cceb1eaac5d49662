"""The peers of the product's eviction policy, behind the same interface, and the bound of all of them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.policy import TailFirstLru

# Where attention over what came before costs as much as the linear part of a block: 8 billion parameters need 16 GFLOP
# a token; 32 layers of width 4096 need 4 * 32 * 4096 = 0.52 MFLOP a token and token before: equal at 30,000 tokens,
# which are 60 blocks of 512.
_EQUAL_DEPTH: Final = 60


class PlainLru(TailFirstLru):
    """Least recently used, in the order in which a prefix is read: its tail ends as the most recent."""

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        for key in prefix:
            self._order.move_to_end(key)


class S3Fifo(TailFirstLru):
    """S3-FIFO (Yang et al., SOSP 2023) in prefix order: a small queue of a tenth, a main queue, ghosts of as many keys
    as the main queue holds. Chunks stored together enter a queue with the tail in front."""

    def __init__(self) -> None:
        self._small: OrderedDict[ChunkKey, int] = OrderedDict()
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._fresh: set[ChunkKey] = set()

    def add(self, key: ChunkKey) -> None:
        known = self._ghosts.pop(key, 0) is None
        (self._main if known else self._small)[key] = 0
        self._fresh.add(key)

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        for key in reversed(prefix):
            if key in self._fresh:
                self._fresh.discard(key)
                (self._small if key in self._small else self._main).move_to_end(key)

    def asked(self, keys: Sequence[ChunkKey], found: int) -> None:
        for key in keys[:found]:
            queue = self._small if key in self._small else self._main
            queue[key] = min(3, queue[key] + 1)

    def discard(self, key: ChunkKey) -> None:
        if self._small.pop(key, None) is not None:
            self._ghosts[key] = None
            while len(self._ghosts) > max(1, len(self._main)):
                self._ghosts.popitem(last=False)
        else:
            self._main.pop(key, None)
        self._fresh.discard(key)

    def coldest(self) -> Iterator[ChunkKey]:
        offered: set[ChunkKey] = set()  # taken by the caller after this, or to be left where they are
        while True:
            # What was offered leaves only when the caller is done.
            small = next((key for key in self._small if key not in offered), None)
            main = next((key for key in self._main if key not in offered), None)
            if small is not None and (main is None or len(self._small) * 10 > len(self._small) + len(self._main)):
                if self._small[small] > 1:
                    del self._small[small]
                    self._main[small] = 0
                    continue
                offered.add(small)
                yield small
            elif main is not None:
                if self._main[main]:
                    self._main[main] -= 1
                    self._main.move_to_end(main)
                    continue
                offered.add(main)
                yield main
            else:
                return


class GreedyDual(TailFirstLru):
    """What costs most to compute again for its bytes stays (GreedyDual-Size, Cao and Irani, 1997): every use gives a
    chunk its cost plus the price of the last eviction. Attention makes deeper blocks dearer; so that a head does not
    go before them, a chunk is worth at least as much as what was used behind it."""

    def __init__(self) -> None:
        self._worth: dict[ChunkKey, float] = {}
        self._heap: list[tuple[float, int, ChunkKey]] = []
        self._price = 0.0
        self._count = 0
        self._depth: dict[ChunkKey, int] = {}

    def add(self, key: ChunkKey) -> None:
        self._set(key, self._price + 1.0)

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        least = 0.0
        for depth in range(len(prefix) - 1, -1, -1):
            least = max(least, self._price + 1.0 + depth / _EQUAL_DEPTH)
            self._set(prefix[depth], least)

    def _set(self, key: ChunkKey, worth: float) -> None:
        self._count += 1
        self._worth[key] = worth
        heapq.heappush(self._heap, (worth, self._count, key))

    def discard(self, key: ChunkKey) -> None:
        self._price = max(self._price, self._worth.pop(key, 0.0))

    def coldest(self) -> Iterator[ChunkKey]:
        kept: list[tuple[float, int, ChunkKey]] = []
        offered: set[ChunkKey] = set()
        try:
            while self._heap:
                front = heapq.heappop(self._heap)
                if self._worth.get(front[2]) != front[0] or front[2] in offered:
                    continue
                kept.append(front)
                offered.add(front[2])
                yield front[2]
        finally:
            for front in kept:
                heapq.heappush(self._heap, front)


def clairvoyant(requests: Sequence[tuple[float, Sequence[ChunkKey]]], capacity: int) -> list[tuple[int, int]]:
    """(hits, writes) of each request where the blocks that return soonest are kept (Belady), a block that returns later
    than all of them is not stored, and of blocks that return together the tail goes first. Whoever asks for a block
    asks for those before it, so they never return later, and what is kept is an unbroken prefix."""
    never = len(requests)
    following: list[list[int]] = []
    upcoming: dict[ChunkKey, int] = {}
    for number in range(never - 1, -1, -1):
        keys = requests[number][1]
        following.append([upcoming.get(key, never) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    following.reverse()
    kept: dict[ChunkKey, int] = {}
    farthest: list[tuple[int, int, ChunkKey]] = []
    outcomes = []
    for (_, keys), returns in zip(requests, following, strict=True):
        hits = 0
        for key in keys:
            if key not in kept:
                break
            hits += 1
        before = {key for key in keys if key in kept}
        for depth, (key, at) in enumerate(zip(keys, returns, strict=True)):
            if at == never:
                kept.pop(key, None)
            else:
                kept[key] = at
                heapq.heappush(farthest, (-at, -depth, key))
        while len(kept) > capacity:
            at, _, key = heapq.heappop(farthest)
            if kept.get(key) == -at:
                del kept[key]
        outcomes.append((hits, sum(key in kept and key not in before for key in keys)))
    return outcomes
