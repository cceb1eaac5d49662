"""One order for the chunks of all KV cache groups of a prefix, so that the store evicts what is of no use first.

A hybrid model keeps its KV in groups. A full-attention group has a chunk for every stretch of the prefix, and a load up
to a boundary needs all of them. A windowed group is needed for the last chunks before the boundary alone, and a
recurrent layer's state is a window of one, there at some boundaries only. So a state without the attention chunks
before it is of no use, and neither are attention chunks behind the last state that is left.

The store knows nothing of groups: it evicts the tail of a prefix before its head, in the order in which a prefix is
named to it. Here that order goes by boundaries, and at each boundary attention comes first, then windows, then states::

    A1 A2 A3 S3 A4 A5 A6 S6        a prefix with states at two boundaries
       a lookup that reaches 6 is a use of A1 … A6 and S6; S3 it does not need

From the tail on: S6 goes first, then A6, A5, A4, which nothing reaches any more, then (had it been used) S3. Two rules
make it hold: a use names only what a load can reach (`reach`, `upto`), and the order is that of the last use alone,
`ORDER`. A policy that keeps attention chunks for being used more often than the states behind them would keep what
no lookup can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm
from typing import Final

import msgspec

from lmcache_nvme_backend.store import ChunkKey
from lmcache_nvme_backend.store.policy import EvictionPolicy, TailFirstLru

# How a namespace with more than full attention is to be opened.
ORDER: Final[Callable[[], EvictionPolicy]] = TailFirstLru

# Names the chunk of a group that ends with this block hash.
KeyOf = Callable[[bytes, int], ChunkKey]


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose KV comes in chunks of their own.

    `number` is vLLM's for the group, `hashes` how many block hashes one chunk covers. `window` is how many chunks
    before a boundary a load up to it needs: None for all (full attention), 1 for a recurrent state.
    """

    number: int
    hashes: int
    window: int | None = None


class Place(msgspec.Struct, frozen=True):
    """What `ChunkStore.put` wants to know of a chunk: `depth` rises along the order and is no count of chunks."""

    key: ChunkKey
    depth: int
    parent: ChunkKey | None


class PrefixOrder:
    """The order for one model's groups. Immutable: may be used from any thread.

    A prefix is given by its block hashes, head first, each of which stands for everything before it; a boundary is a
    number of block hashes.
    """

    def __init__(self, groups: Iterable[CacheGroup], key_of: KeyOf) -> None:
        """At least one group; raises `ValueError` for a group that is named twice or covers no hash."""
        self._groups = sorted(groups, key=lambda g: (g.window is not None, -(g.window or 0), g.number))
        self._key_of = key_of
        self._ranks = {group.number: rank for rank, group in enumerate(self._groups)}
        self._full = [group for group in self._groups if group.window is None]
        self._windowed = [group for group in self._groups if group.window is not None]
        if not self._groups or len(self._ranks) != len(self._groups):
            raise ValueError("groups are told apart by their numbers, and there is at least one")
        if any(group.hashes < 1 or (group.window or 1) < 1 for group in self._groups):
            raise ValueError("a chunk covers at least one block hash, and a window one chunk")
        self._step = lcm(*(group.hashes for group in self._groups))

    @property
    def hybrid(self) -> bool:
        """Whether there is anything but full attention, so that the namespace needs `ORDER`."""
        return bool(self._windowed)

    def whole(self, boundary: int) -> int:
        """The last boundary up to this one at which chunks of all groups end."""
        return boundary // self._step * self._step

    def place(self, hashes: Sequence[bytes], end: int, number: int) -> Place:
        """Where the chunk of group `number` stands that ends at boundary `end`, 1 to len(hashes).

        `end` may lie inside a chunk: vLLM stores a prompt's tail up to there, for all groups at once.
        """
        rank = self._ranks[number]
        return Place(self._key_of(hashes[end - 1], number), self._depth(end, rank), self._parent(hashes, end, rank))

    def depth(self, end: int, number: int) -> int:
        """The depth of the chunk of group `number` that ends at boundary `end`."""
        return self._depth(end, self._ranks[number])

    def depths_upto(self, end: int) -> list[int]:
        """The depths that belong to the keys of `upto`."""
        return [self._depth(boundary, rank) for boundary, rank in sorted(self._needed(end))]

    def _depth(self, end: int, rank: int) -> int:
        return end * len(self._groups) + rank

    def _parent(self, hashes: Sequence[bytes], end: int, rank: int) -> ChunkKey | None:
        """The chunk right before in the order, of those that this one needs and that are there as a rule: states at
        other boundaries are not."""
        partial = end % self._groups[rank].hashes > 0
        best: tuple[int, int] | None = None
        for group in self._groups[: rank + 1] if rank >= len(self._full) else self._full:
            at = self._ranks[group.number]
            if at < rank and (partial or end % group.hashes == 0):
                before = end
            elif group.window is None:
                before = (end - 1) // group.hashes * group.hashes
            else:
                continue
            if before > 0 and (best is None or (before, at) > best):
                best = (before, at)
        return None if best is None else self._key_of(hashes[best[0] - 1], self._groups[best[1]].number)

    def upto(self, hashes: Sequence[bytes], end: int) -> list[ChunkKey]:
        """The keys of what a load up to boundary `end` needs, in the order, head first."""
        wanted = sorted(self._needed(end))
        return [self._key_of(hashes[boundary - 1], self._groups[rank].number) for boundary, rank in wanted]

    def _needed(self, end: int) -> Iterator[tuple[int, int]]:
        for rank, group in enumerate(self._groups):
            size, partial = group.hashes, end % group.hashes > 0
            whole = end // size
            first = 0 if group.window is None else max(0, whole + partial - group.window)
            for chunk in range(first, whole):
                yield (chunk + 1) * size, rank
            if partial:
                yield end, rank

    def reach(self, hashes: Sequence[bytes], present: Callable[[ChunkKey], bool]) -> int:
        """The last boundary, of those at which chunks of all groups end, up to which everything that a load needs is
        present; 0 where there is none.

        `present` is asked from the head on, and about windows from the tail on.
        """
        end = self.whole(len(hashes))
        for group in self._full:
            at = group.hashes
            while at <= end and present(self._key_of(hashes[at - 1], group.number)):
                at += group.hashes
            end = self.whole(min(end, at - group.hashes))
        while end > 0:
            if all(present(key) for key in self._windows(hashes, end)):
                return end
            end -= self._step
        return 0

    def _windows(self, hashes: Sequence[bytes], end: int) -> Iterator[ChunkKey]:
        for group in reversed(self._windowed):
            for back in range(min(group.window or 0, end // group.hashes)):
                yield self._key_of(hashes[end - back * group.hashes - 1], group.number)
