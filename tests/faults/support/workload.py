"""A seeded run of stores, loads and removals; every payload follows from seed, namespace and key."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from hashlib import shake_128
from pathlib import Path
from typing import Final

from lmcache_nvme_backend.store import (
    ChunkKey,
    ChunkStore,
    Hit,
    Namespace,
    StoreSettings,
    census,
    digest_fields,
    recovery,
    upkeep,
)
from tests.faults.support.record import Did, Record

NAMESPACES: Final = tuple(Namespace({"model": "m", "rank": rank}) for rank in range(2))
LARGEST: Final = 24_000
# Some 25 chunks of the 120 that there are: stores evict all the time.
QUOTA: Final = 100 * 4096

PREFIXES: Final = tuple(
    tuple(digest_fields("prefix", number, depth) for depth in range(1 + number % 6)) for number in range(18)
)


def payload(seed: int, which: int, key: bytes) -> bytes:
    """1 to `LARGEST` bytes; those of every second key compress to half."""
    start = f"{seed} {which} ".encode() + key
    length = 1 + int.from_bytes(shake_128(b"length" + start).digest(4), "little") % LARGEST
    if key[0] % 2:
        half = shake_128(start).digest(length // 2 + 1)
        return (half + half)[:length]
    return shake_128(start).digest(length)


def aligned(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, max(len(data), 1)))[: len(data)]
    view[:] = data
    return view


def random_settings(chance: random.Random, codec: str) -> StoreSettings:
    return StoreSettings(
        quota_bytes=QUOTA,
        direct_io=chance.choice(("auto", "off")),
        fsync=chance.choice(("none", "none", "data")),
        codec=codec,  # type: ignore[arg-type]
        lock_wait_s=5.0,
    )


def small_counts_as_large(change: Callable[[object, str, int], None] = setattr) -> None:
    """From now on a namespace of a few chunks has a snapshot, opens from it, and is listed by several threads, as one
    of many thousands does."""
    change(upkeep, "SNAPSHOT_FROM", 1)
    change(upkeep, "RANK_AT_OPEN", 0)
    change(census, "RANK_AT_OPEN", 0)
    change(recovery, "CHEAP_LISTING", 0)


class Workload:
    """What one process does to one namespace."""

    def __init__(self, seed: int, which: int, store: ChunkStore, record: Record, chance: random.Random) -> None:
        self._seed, self._which, self._store, self._record, self._chance = seed, which, store, record, chance
        self._into = aligned(bytes(LARGEST))

    def turn(self) -> None:
        keys = self._chance.choice(PREFIXES[:5] if self._chance.random() < 0.6 else PREFIXES)  # some are in favour
        share = self._chance.random()
        if share < 0.6:
            self._store_prefix(keys)
        elif share < 0.9:
            self._load_prefix(keys)
        else:
            self._store.remove(self._chance.choice(keys))

    def _store_prefix(self, keys: tuple[ChunkKey, ...]) -> None:
        for depth, key in enumerate(keys):
            self._record.append(Did.PUTTING, self._which, key)
            self._store.put(
                key,
                aligned(payload(self._seed, self._which, key)),
                depth=depth,
                parent=keys[depth - 1] if depth else None,
                tokens=depth + 1,
            )
            self._record.append(Did.PUT, self._which, key)

    def _load_prefix(self, keys: tuple[ChunkKey, ...]) -> None:
        count = self._store.match(keys, pin=True)
        for key in keys[:count]:
            right = self.loads_right(key)
            if right is not None:
                self._record.append(Did.LOADED if right else Did.WRONG, self._which, key)
            self._store.unpin(key)

    def loads_right(self, key: ChunkKey) -> bool | None:
        """Whether a chunk has its bytes; None where it cannot be loaded."""
        result = self._store.get(key, self._into)
        if not isinstance(result, Hit):
            return None
        return bytes(self._into[: result.nbytes]) == payload(self._seed, self._which, key)


def chunk_files(root: Path) -> Iterator[Path]:
    return root.glob("v1/*/*/*.kv")
