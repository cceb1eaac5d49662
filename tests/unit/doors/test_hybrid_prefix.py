"""Chunks of several KV cache groups in one order: what nothing can use any more is what goes next."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_nvme_backend.doors.hybrid_prefix import ORDER, CacheGroup, PrefixOrder
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Namespace, PutResult, StoreSettings, digest_fields
from lmcache_nvme_backend.store.format import BLOCK, blocks_of

PAYLOAD = 5000
FILE = blocks_of(PAYLOAD) * BLOCK
ATTENTION, SECOND_ATTENTION, SLIDING, STATE, OTHER_STATE = range(5)
QWEN = (CacheGroup(ATTENTION, 1), CacheGroup(STATE, 1, window=1), CacheGroup(OTHER_STATE, 1, window=1))
SLIDED = (CacheGroup(ATTENTION, 2), CacheGroup(SECOND_ATTENTION, 2), CacheGroup(SLIDING, 1, window=3))
DENSE = (CacheGroup(ATTENTION, 1), CacheGroup(SECOND_ATTENTION, 1))


def key_of(block_hash: bytes, group: int) -> ChunkKey:
    return digest_fields(block_hash, group)


def prefix(name: str, length: int) -> list[bytes]:
    """Block hashes, each standing for what is before it."""
    return [f"{name}/{i}".encode() for i in range(1, length + 1)]


def names(order: PrefixOrder, hashes: list[bytes], groups: tuple[CacheGroup, ...]) -> dict[ChunkKey, str]:
    """Each chunk's group and boundary, to read an order by."""
    return {
        key_of(hashes[end - 1], group.number): f"{'ABWST'[group.number]}{end}"
        for group in groups
        for end in range(1, len(hashes) + 1)
    }


def test_attention_comes_before_the_state_at_the_same_boundary():
    """A use of a prefix up to a boundary is a use of all its attention, and of the states there alone."""
    order, hashes = PrefixOrder(QWEN, key_of), prefix("p", 6)
    named = names(order, hashes, QWEN)
    assert [named[key] for key in order.upto(hashes, 4)] == ["A1", "A2", "A3", "A4", "S4", "T4"]


def test_a_sliding_window_is_needed_for_its_last_chunks():
    """Groups may have chunks of different sizes; boundaries put them in order."""
    order, hashes = PrefixOrder(SLIDED, key_of), prefix("p", 6)
    named = names(order, hashes, SLIDED)
    assert [named[key] for key in order.upto(hashes, 6)] == ["A2", "B2", "A4", "B4", "W4", "W5", "A6", "B6", "W6"]
    assert [named[key] for key in order.upto(hashes, 2)] == ["W1", "A2", "B2", "W2"]


@pytest.mark.parametrize("groups", [QWEN, SLIDED, DENSE])
def test_depth_rises_along_the_order_and_each_parent_is_needed(groups):
    """What `put` is told of a chunk agrees with the order of its prefix."""
    order, hashes = PrefixOrder(groups, key_of), prefix("p", 8)
    for end in (2, 4, 8):
        keys = order.upto(hashes, end)
        depths: list[int] = []
        for key in keys:
            [(number, at)] = [
                (group.number, end)
                for group in groups
                for end in range(1, 9)
                if key_of(hashes[end - 1], group.number) == key
            ]
            place = order.place(hashes, at, number)
            assert place.key == key
            assert place.parent is None or groups is SLIDED or place.parent in keys[: keys.index(key)]
            depths.append(place.depth)
        assert depths == sorted(set(depths))


def test_the_parents_of_a_state_lead_through_all_attention_before_it():
    """So that storing it is a use of them, and evicting for it spares them."""
    order, hashes = PrefixOrder(QWEN, key_of), prefix("p", 3)
    named, found = names(order, hashes, QWEN), []
    places = {
        order.place(hashes, end, group.number).key: order.place(hashes, end, group.number)
        for group in QWEN
        for end in (1, 2, 3)
    }
    at: ChunkKey | None = order.place(hashes, 3, OTHER_STATE).key
    while at is not None:
        found.append(named[at])
        at = places[at].parent
    assert found == ["T3", "S3", "A3", "A2", "A1"]


def test_a_tail_inside_a_chunk_stands_behind_the_whole_ones():
    """vLLM stores a prompt's tail for all groups at a boundary of its own."""
    groups = (CacheGroup(ATTENTION, 4), CacheGroup(STATE, 4, window=1))
    order, hashes = PrefixOrder(groups, key_of), prefix("p", 6)
    named = names(order, hashes, groups)
    assert [named[key] for key in order.upto(hashes, 6)] == ["A4", "A6", "S6"]
    assert named[order.place(hashes, 6, STATE).parent or ChunkKey(b"")] == "A6"
    assert named[order.place(hashes, 6, ATTENTION).parent or ChunkKey(b"")] == "A4"


def test_reach_is_the_last_boundary_with_a_state_on_whole_attention():
    """A hole in the attention ends it; a state that lacks one of its groups is none."""
    order, hashes = PrefixOrder(QWEN, key_of), prefix("p", 8)
    here = {key for end in (3, 5) for key in order.upto(hashes, end)}
    assert order.reach(hashes, here.__contains__) == 5
    assert order.reach(hashes, (here - {key_of(hashes[4], OTHER_STATE)}).__contains__) == 3
    assert order.reach(hashes, (here - {key_of(hashes[3], ATTENTION)}).__contains__) == 3
    assert order.reach(hashes, (here - {key_of(hashes[0], ATTENTION)}).__contains__) == 0
    assert order.reach(hashes[:4], here.__contains__) == 3
    assert order.reach([], here.__contains__) == 0


def test_only_groups_that_can_be_told_apart_make_an_order():
    """Two of one number, an empty chunk, no group at all: bugs of a caller, not of a person."""
    for groups in ((CacheGroup(0, 1), CacheGroup(0, 1)), (CacheGroup(0, 0),), ()):
        with pytest.raises(ValueError, match=r"group|chunk"):
            PrefixOrder(groups, key_of)
    assert PrefixOrder(QWEN, key_of).hybrid and not PrefixOrder(DENSE, key_of).hybrid


class Engine:
    """Requests that share prefixes, as a hybrid model's engine stores and looks them up: attention for every boundary,
    states where a step ended."""

    def __init__(self, store: ChunkStore, groups: tuple[CacheGroup, ...], seed: int) -> None:
        self.store, self.groups, self.rng = store, groups, random.Random(seed)
        self.order = PrefixOrder(groups, key_of)
        self.prefixes: list[list[bytes]] = []
        self._payload = memoryview(mmap.mmap(-1, PAYLOAD))
        self.window = max(group.window or 0 for group in groups)
        self.step = 2 * max(group.hashes for group in groups)

    def request(self, hashes: list[bytes]) -> int:
        """Look up, and store what is missing; the boundary that a load could reach. Checks after every store."""
        found = self.order.reach(hashes, self.here)
        if found:
            assert self.store.match(self.order.upto(hashes, found)) == len(self.order.upto(hashes, found))
        evicted = self.store.stats.evictions
        for end in range(found + 1, len(hashes) + 1):
            for group in sorted(self.groups, key=lambda g: g.window == 1):
                state = group.window == 1
                if end % group.hashes or (state and end % self.step and end != len(hashes)):
                    continue
                place = self.order.place(hashes, end, group.number)
                result = self.store.put(place.key, self._payload, depth=place.depth, parent=place.parent)
                assert result in (PutResult.STORED, PutResult.EXISTS)
            if (reached := self.order.reach(hashes[:end], self.here)) == end:
                self.store.match(self.order.upto(hashes, reached), again=True)
            if self.store.stats.evictions > evicted:
                evicted = self.store.stats.evictions
                self.check(hashes)
        return found

    def here(self, key: ChunkKey) -> bool:
        return key in self.store._index

    def draw(self) -> list[bytes]:
        """An old prefix again, one that leaves an old one somewhere, or a new one."""
        kind = self.rng.random()
        length = self.rng.randrange(1, 3) * self.step
        if self.prefixes and kind < 0.35:
            return self.rng.choice(self.prefixes)
        if self.prefixes and kind < 0.7:
            trunk = self.rng.choice(self.prefixes)
            trunk = trunk[: self.rng.randrange(1, min(2, len(trunk) // self.step) + 1) * self.step]
            fresh = trunk + prefix(f"{trunk[-1].decode()}+{len(self.prefixes)}", length)
        else:
            fresh = prefix(str(len(self.prefixes)), length)
        self.prefixes.append(fresh)
        return fresh

    def check(self, current: list[bytes]) -> None:
        """Every state stands on whole attention, and all attention is reached, but for the one prefix that is being
        cut and the one that is being written."""
        here, block = set(self.store._index.all_keys()), max(group.hashes for group in self.groups)
        useful = set(self.order.upto(current, len(current)))
        for hashes in self.prefixes:
            for end in range(block, len(hashes) + 1, block):
                keys = self.order.upto(hashes, end)
                if here.issuperset(keys):
                    useful.update(keys)
        cut = here - useful
        paths = [set(self._all(hashes)) for hashes in self.prefixes]
        if self.window > 1:
            # Windows of neighbouring boundaries overlap, and holes in them are left to their age.
            cut -= {key for hashes in self.prefixes for key in self._all(hashes, windowed=True)}
        assert not cut or any(cut <= path for path in paths), "orphans of more than one prefix"
        next_to_go = [key for key in self.store._index.coldest_first() if key in useful or key in cut][: len(cut)]
        assert set(next_to_go) == cut, "an orphan that is not what goes next"

    def _all(self, hashes: list[bytes], windowed: bool = False) -> Iterator[ChunkKey]:
        for group in self.groups:
            for end in range(group.hashes, len(hashes) + 1, group.hashes):
                if group.window is not None or not windowed:
                    yield key_of(hashes[end - 1], group.number)


@pytest.mark.parametrize("groups", [QWEN, SLIDED], ids=["states", "window"])
@pytest.mark.parametrize("seed", range(2))
def test_no_orphan_of_either_kind_stays_in_a_store_that_is_full(tmp_path: Path, groups, seed):
    """Far past the quota, with prefixes that branch: a state whose attention went, or attention that no state reaches,
    is there only where an eviction has just cut, and it goes next."""
    settings = StoreSettings(quota_bytes=40 * FILE)
    hits = 0
    with ChunkStore.open(tmp_path, Namespace({"g": seed}), settings, ORDER()) as store:
        engine = Engine(store, groups, seed)
        for _ in range(40):
            hits += engine.request(engine.draw()) > 0
        assert store.stats.evictions > 80 and hits > 3
        known = engine.prefixes
    with ChunkStore.open(tmp_path, Namespace({"g": seed}), settings, ORDER()) as store:
        engine = Engine(store, groups, seed + 100)
        engine.prefixes = known
        for _ in range(6):
            engine.request(engine.draw())
