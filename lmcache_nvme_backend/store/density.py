"""The default order of eviction: least hits to be expected for the room first."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from heapq import merge
from itertools import groupby, islice, repeat, takewhile
from operator import itemgetter
from typing import Final

from lmcache_nvme_backend.store.ghosts import Ghosts, seconds_between
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.policy import Frozen, Install
from lmcache_nvme_backend.store.returns import CLASSES, MAX_USES, SAME_USE_S, Returns, bucket_of

# The densities are worked out anew this often, some 3 ms each time.
_LEARN_INTERVAL_S: Final = 30
# A chunk's state over a restart: its class in three bits, and when it was used last in units of this, mod 2**12.
_STATE_UNIT_S: Final = 64
_STATE_TIMES: Final = 1 << 12
# A million classes in a row still fit into one unit.
_TURN_S: Final = 1e-6
# By class: key -> when it was used last, the one unused for longest in front.
_Queues = tuple[OrderedDict[ChunkKey, float], ...]
# A thousandth of the evictions of the last minutes, more or less, tells what room costs.
_PRICE_WEIGHT: Final = 1 / 256


class HitDensity:
    """One queue a class of chunks (how often used, whether anything follows it in its prefix), each in the order of
    `TailFirstLru`; the next to go is the front of the queue whose front has the lowest density (see `Returns`).

    A chunk is never used less often than the ones after it in its prefix, nor longer ago, so the tail of a prefix
    still goes before its head. Chunks that went are remembered as `Ghosts`, and go on counting their uses.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._queues: _Queues = tuple(OrderedDict() for _ in range(CLASSES))
        self._returns = Returns()
        self._densities: list[list[float]] = []
        self._learned_at = float("-inf")
        self._asks = False  # whether lookups come here at all
        self._price = 0.0  # density of what went lately: what room costs
        self._ghosts = Ghosts()
        self.ghosts: Ghosts | None = self._ghosts

    def load(self, coldest_first: Sequence[ChunkKey], states: Sequence[int] = ()) -> None:
        self._queues = self._arranged(coldest_first, states or repeat(0, len(coldest_first)), by_time=False)

    def _arranged(self, coldest_first: Iterable[ChunkKey], states: Iterable[int], by_time: bool) -> _Queues:
        """Queues of these. `by_time`: their order is later news than the states.

        A million of them have some thousands of states in a row: the loop is over those.
        """
        unit = int(self._clock()) // _STATE_UNIT_S
        queues: _Queues = tuple(OrderedDict() for _ in range(CLASSES))
        used, since, turns, last = 0.0, 0, 0, -1
        keys = iter(coldest_first)
        for state, run in groupby(states):
            # Unknown: as if never used again, but somewhere inside its prefix.
            kind = state >> 1 & CLASSES - 1 if state else 1
            known = (unit - (unit - (state >> 4)) % _STATE_TIMES) * _STATE_UNIT_S if state else 0
            if by_time:
                known = max(since, known)
            if known != since or kind != last:
                # Times that keep the order across the queues, one object for all in a row.
                turns += 1
                since, last, used = known, kind, known + turns * _TURN_S
            _exhaust(map(queues[kind].__setitem__, islice(keys, len(list(run))), repeat(used)))
        return queues

    def frozen(self) -> Frozen:
        queues, now = self._queues, self._clock()
        orders = [list(queue) for queue in queues]

        def work() -> tuple[Iterator[ChunkKey], Mapping[ChunkKey, int]]:
            runs = [_run(queue, order, now) for queue, order in zip(queues, orders)]
            return _ordered(runs), _states(runs)

        return work

    def ranked(self, coldest_first: Iterable[ChunkKey], states: Mapping[ChunkKey, int]) -> Install:
        keys = list(coldest_first)
        queues = self._arranged(keys, map(states.get, keys, repeat(0)), by_time=True)

        def install(gone: Iterable[ChunkKey], recent: Set[ChunkKey]) -> None:
            for key in gone:
                for queue in queues:
                    queue.pop(key, None)
            for old, new in zip(self._queues, queues):
                for key in reversed(list(takewhile(recent.__contains__, reversed(old)))):
                    for queue in queues:
                        queue.pop(key, None)
                    new[key] = old[key]
            self._queues = queues

        return install

    def add(self, key: ChunkKey) -> None:
        now = self._clock()
        ghost = self._ghosts.find(key)
        self._take(key)
        self._queues[2 * ghost[0] if ghost is not None else 0][key] = now

    def touch(self, prefix: Sequence[ChunkKey]) -> None:
        self._use(prefix, again=False)

    def asked(self, keys: Sequence[ChunkKey], found: int) -> None:
        now = self._clock()
        self._asks = True
        self._returns.asked(keys, int(now))
        self._use(keys if found == len(keys) else keys[:found], again=True)
        ghosts = self._ghosts
        least = 0  # who asks for a chunk asks for what is before it
        for key in reversed(keys[found:]):
            uses = 0
            ghost = ghosts.find(key)
            if ghost is not None:
                uses = ghost[0] + (seconds_between(ghost[1], int(now)) >= SAME_USE_S)
            least = max(least, uses)
            ghosts.put(key, least, int(now))

    def _use(self, prefix: Sequence[ChunkKey], again: bool) -> None:
        """From the tail to the head, which ends as the most recent and is at least as often used.

        A long prefix is looked up on every turn, so it moves in runs of one class, by loops that Python has in C.
        """
        now = self._clock()  # one object for all of them
        rest = prefix[::-1]
        least = 0
        followed = 0  # 1 behind the tail: something follows
        while rest:
            kind = next(kind for kind, queue in enumerate(self._queues) if rest[0] in queue)
            queue = self._queues[kind]
            run = list(takewhile(queue.__contains__, rest)) if followed or kind & 1 else [rest[0]]
            uses = kind >> 1
            if again and uses < MAX_USES:
                times = set(map(queue.__getitem__, run))  # few: what was used together has one time
                if now - min(times) >= SAME_USE_S > now - max(times):
                    del run[1:]  # they differ: one by one
                uses += now - queue[run[0]] >= SAME_USE_S
            uses = least = max(uses, least)
            new = uses << 1 | kind & 1 | followed
            followed = 1
            if new == kind:
                _exhaust(map(queue.__setitem__, run, repeat(now)))
                _exhaust(map(queue.move_to_end, run))
            else:
                _exhaust(map(queue.pop, run, repeat(None)))  # a key may be in a prefix twice
                _exhaust(map(self._queues[new].__setitem__, run, repeat(now)))
            rest = rest[len(run) :]

    def discard(self, key: ChunkKey) -> None:
        found = self._take(key)
        if found is not None:
            kind, used = found
            self._ghosts.put(key, kind >> 1, int(used))
            if self._densities:
                density = self._densities[kind][bucket_of(int(self._clock() - used))]
                self._price += (density - self._price) * _PRICE_WEIGHT

    def offered(self, key: ChunkKey) -> int:
        now = self._clock()
        ghost = self._ghosts.find(key)
        if ghost is None:
            self._ghosts.put(key, 0, int(now))
            return 0
        if self._asks:
            return ghost[0]
        # A rank that is never asked (`lookup_server_worker_ids`) sees only what is offered.
        uses = ghost[0] + (seconds_between(ghost[1], int(now)) >= SAME_USE_S)
        self._ghosts.put(key, uses, int(now))
        return uses

    def chance(self, key: ChunkKey) -> float:
        self._learn()
        ghost = self._ghosts.find(key)
        return self._returns.chance(2 * (ghost[0] if ghost is not None else 0) + 1, self._densities, self._price)

    def _take(self, key: ChunkKey) -> tuple[int, float] | None:
        for kind, queue in enumerate(self._queues):
            used = queue.pop(key, None)
            if used is not None:
                return kind, used
        return None

    def coldest(self) -> Iterator[ChunkKey]:
        self._learn()
        now = self._clock()
        densities = self._densities
        fronts: list[tuple[float, float, int, ChunkKey, Iterator[tuple[ChunkKey, float]]]] = []

        def enter(kind: int, rest: Iterator[tuple[ChunkKey, float]]) -> None:
            for key, used in rest:
                fronts.append((densities[kind][bucket_of(int(now - used))], used, kind, key, rest))
                return

        for kind, queue in enumerate(self._queues):
            enter(kind, iter(queue.items()))
        while fronts:
            front = min(fronts)
            fronts.remove(front)
            yield front[3]
            enter(front[2], front[4])

    def _learn(self) -> None:
        now = self._clock()
        if not 0 <= now - self._learned_at < _LEARN_INTERVAL_S:
            self._learned_at = now
            self._densities = self._returns.densities(int(now))


_Run = tuple[list[ChunkKey], list[float]]  # one class: keys, and when each was used last


def _run(queue: Mapping[ChunkKey, float], order: list[ChunkKey], now: float) -> _Run:
    """A queue as it was `now`, a moment ago. What has moved since counts as used then."""
    keys: list[ChunkKey] = []
    times: list[float] = []
    moved: list[ChunkKey] = []
    for key in order:
        used = queue.get(key)
        if used is None or used > now:
            moved.append(key)
        else:
            keys.append(key)
            times.append(used)
    return keys + moved, times + [now] * len(moved)


def _ordered(runs: Sequence[_Run]) -> Iterator[ChunkKey]:
    # Merged one by one: a sort of a million keys holds the interpreter for as long as it takes.
    pairs = (zip(times, keys) for keys, times in runs)
    return map(itemgetter(1), merge(*pairs, key=itemgetter(0)))


def _states(runs: Sequence[_Run]) -> Mapping[ChunkKey, int]:
    shared: dict[int, int] = {}
    found: dict[ChunkKey, int] = {}
    for kind, (keys, times) in enumerate(runs):
        for key, used in zip(keys, times):
            if used > _STATE_UNIT_S:
                state = (int(used) // _STATE_UNIT_S % _STATE_TIMES) << 4 | kind << 1 | 1
                found[key] = shared.setdefault(state, state)
    return found


_exhaust: Final = deque[object](maxlen=0).extend
