"""How soon chunks are asked for again, learned from what is asked, and what room they deserve for it.

Chunks fall into classes. For each class and age the rate of returns is estimated as in survival analysis: returns
divided by the time during which a return could have been seen, so that chunks still waiting count as well. From the
rates follows a chunk's density, the most hits per second of occupied room that keeping it from now on can bring
(Gittins' index of a chunk that is kept until it returns or until the best moment to give it up): J. C. Gittins,
"Bandit processes and dynamic allocation indices", 1979; hit density as the order of eviction: N. Beckmann et al.,
"LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.

What is learned does not depend on what is kept: a sample of the keys is followed whether they are here or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lmcache_nvme_backend.store.keys import ChunkKey

MAX_USES: Final = 3
# A class is 2 * uses + (1 where the chunk has been followed by another one in its prefix).
CLASSES: Final = 2 * (MAX_USES + 1)
# Uses within this many seconds are one: a waiting request is looked up again at every step, and then it loads.
SAME_USE_S: Final = 2
# Ages in powers of two of a second up to 2**20 s (12 days); bucket b holds 2**(b-1) <= age < 2**b.
_BUCKETS: Final = 21
_EDGES: Final = (0, *(1 << b for b in range(_BUCKETS)))
# Keys followed at most; the share of all keys that is followed is halved where that is not enough. About 1 MiB.
_SAMPLE: Final = 4096
# Of a long prefix, the chunks behind the first 64 are followed at an eighth of the share: a lookup of 512 chunks must
# not spend its time here, and what is deep in one prefix lives and dies together.
_NEAR: Final = 64
_DEEP: Final = 8
# Returns and endings are counted for half as much when this many have been counted, so that habits may change.
_WINDOW: Final = 8192
# Weights of what is assumed where little has been seen, in lifetimes: that the rate of all classes falls with age
# to the power of -1.5 where no such age was seen yet, and that a class's rate is in proportion to that of all.
_POOLED_WEIGHT: Final = 3.0
_CLASS_WEIGHT: Final = 10.0
_FALL: Final = 1.5
# Lifetimes seen, in whole or in part, before a chunk is refused for what they tell.
_ENOUGH: Final = 200


class Returns:
    """Not thread-safe: called with the index's lock held. Times are whole seconds of one clock."""

    def __init__(self) -> None:
        # key -> class, second of the last use, by what its share is divided
        self._followed: dict[ChunkKey, tuple[int, int, int]] = {}
        self._share = 256  # keys whose sixth byte is below are followed
        self._returned = _table()
        self._ended = _table()  # lifetimes whose end, by a return or by losing sight, was seen in this bucket
        self._part = _table()  # seconds that those spent in that bucket
        self._count = 0
        self._latest: list[list[float]] = []

    @property
    def has_learned(self) -> bool:
        """Whether enough has been seen to go by it."""
        return self._count + len(self._followed) >= _ENOUGH

    def asked(self, keys: Sequence[ChunkKey], now_s: int) -> None:
        """A request asks for this prefix; what of it is here does not matter."""
        share, deep = self._share, self._share // _DEEP
        followed = self._followed
        chosen = [(key, 1) for key in keys[:_NEAR] if key[5] < share]
        if len(keys) > _NEAR:
            chosen += [(key, _DEEP) for key in keys[_NEAR:] if key[5] < deep]
        for key, part in chosen:
            known = followed.pop(key, None)
            extended = key is not keys[-1]
            if known is None:
                followed[key] = (int(extended), now_s, part)
                continue
            old, since, _ = known
            if now_s - since >= SAME_USE_S:
                self._end(old, now_s - since, returned=True)
                new = min(old + 2, CLASSES - 2 + (old & 1))
            else:
                new = old
            followed[key] = (new | extended, now_s, part)
        if len(followed) > _SAMPLE:
            self._thin(now_s)

    def _end(self, kind: int, age: int, returned: bool) -> None:
        bucket = bucket_of(age)
        self._returned[kind][bucket] += returned
        self._ended[kind][bucket] += 1
        self._part[kind][bucket] += min(age, _EDGES[bucket + 1]) - _EDGES[bucket]
        self._count += 1
        if self._count > _WINDOW:
            self._count //= 2
            for table in (self._returned, self._ended, self._part):
                for row in table:
                    row[:] = [value / 2 for value in row]

    def _thin(self, now_s: int) -> None:
        """Follow fewer keys. Those given up were seen waiting until now."""
        if self._share > 1:
            self._share //= 2
            gone = [key for key, (_, _, part) in self._followed.items() if key[5] >= self._share // part]
        else:  # the order of the dict is that of the last use
            gone = list(self._followed)[: _SAMPLE // 2]
        for key in gone:
            kind, since, _ = self._followed.pop(key)
            self._end(kind, now_s - since, returned=False)

    def densities(self, now_s: int) -> list[list[float]]:
        """Hits a second by class and bucket of age. Never higher for an older chunk or for one used less often, so
        that no chunk comes after one that depends on it."""
        if not self.has_learned:
            return _table()  # all alike: what was used last is kept
        rates = self._latest = self._rates(now_s)
        table = [_densities(row) for row in rates]
        for row in table:
            for age in reversed(range(_BUCKETS - 1)):
                row[age] = max(row[age], row[age + 1])
        for kind in range(CLASSES):
            for below in ({kind - 1, kind - 2} if kind & 1 else {kind - 2}) - {-1, -2}:
                table[kind] = [max(pair) for pair in zip(table[kind], table[below])]
        return table

    def chance(self, kind: int, densities: list[list[float]], price: float) -> float:
        """How likely a new chunk of this class returns before its density falls below `price`; 1 where nothing has
        been learned."""
        if not self._latest:
            return 1.0
        hazard = 0.0
        for bucket, density in enumerate(densities[kind]):
            if density < price:
                break
            hazard += self._latest[kind][bucket] * _WIDTHS[bucket]
        return -math.expm1(-hazard)

    def _rates(self, now_s: int) -> list[list[float]]:
        """Returns a second of what has not returned yet, by class and bucket."""
        ended = [list(row) for row in self._ended]
        part = [list(row) for row in self._part]
        for kind, since, _ in self._followed.values():
            age = now_s - since
            bucket = bucket_of(age)
            ended[kind][bucket] += 1
            part[kind][bucket] += age - _EDGES[bucket]
        exposed = [_exposure(ended_row, part_row) for ended_row, part_row in zip(ended, part)]
        returned = self._returned
        total = sum(map(sum, exposed))
        pooled: list[float] = []
        for bucket, width in enumerate(_WIDTHS):
            if not bucket:
                assumed = sum(map(sum, returned)) / total if total else 1e-9
            else:
                assumed = pooled[-1] * (_EDGES[bucket] / max(1, _EDGES[bucket - 1])) ** -_FALL
            seen = sum(row[bucket] for row in returned)
            time = sum(row[bucket] for row in exposed)
            pooled.append((seen + _POOLED_WEIGHT * assumed * width) / (time + _POOLED_WEIGHT * width))
        rates = []
        for kind in range(CLASSES):
            expected = sum(map(float.__mul__, pooled, exposed[kind]))
            ratio = (sum(returned[kind]) + 1) / (expected + 1)
            rates.append(
                [
                    (seen + _CLASS_WEIGHT * ratio * rate * width) / (time + _CLASS_WEIGHT * width)
                    for seen, time, rate, width in zip(returned[kind], exposed[kind], pooled, _WIDTHS)
                ]
            )
        return rates


def bucket_of(age_s: int) -> int:
    """The bucket of an age; a clock that went back is age 0."""
    return min(age_s.bit_length(), _BUCKETS - 1) if age_s > 0 else 0


_WIDTHS: Final = tuple(float(_EDGES[b + 1] - _EDGES[b]) for b in range(_BUCKETS))


def _table() -> list[list[float]]:
    return [[0.0] * _BUCKETS for _ in range(CLASSES)]


def _exposure(ended: list[float], part: list[float]) -> list[float]:
    """Seconds spent in each bucket by lifetimes that ended in `ended`, after `part` seconds there."""
    exposure = [0.0] * _BUCKETS
    later = 0.0
    for bucket in reversed(range(_BUCKETS)):
        exposure[bucket] = part[bucket] + later * _WIDTHS[bucket]
        later += ended[bucket]
    return exposure


def _densities(rates: list[float]) -> list[float]:
    """From each age on: the best ratio, over all moments to give up, of returns to expected seconds of waiting."""
    found = []
    returns_in = [-math.expm1(-rate * width) for rate, width in zip(rates, _WIDTHS)]
    waits_in = [p / rate if rate > 0 else width for p, rate, width in zip(returns_in, rates, _WIDTHS)]
    for start in range(_BUCKETS):
        left, returns, waits, best = 1.0, 0.0, 0.0, 0.0
        for p, wait in zip(returns_in[start:], waits_in[start:]):
            returns += left * p
            waits += left * wait
            left *= 1 - p
            best = max(best, returns / waits)
        found.append(best)
    return found
