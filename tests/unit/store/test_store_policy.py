"""The default order of eviction: what is likeliest to return for its room stays, and the tail goes before its head."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import prefix

from lmcache_nvme_backend.store.density import HitDensity
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import digest_fields
from lmcache_nvme_backend.store.policy import TailFirstLru
from lmcache_nvme_backend.store.returns import CLASSES, Returns


def known(policy):
    """What the policy knows of each chunk, as it is kept over a restart."""
    _, states = policy.frozen()()
    return states


class World:
    """An index with a clock of its own, and what a store does with it."""

    def __init__(self, policy=HitDensity):
        self.now = 1.7e9
        self.policy = policy(lambda: self.now)
        self.index = Index(self.policy, lambda: int(self.now * 1e9))

    def request(self, keys, capacity=None):
        """Look a prefix up and store what is missing; returns the hits."""
        hits = self.index.use_prefix(keys, pin=False)
        for depth, key in enumerate(keys):
            if key not in self.index:
                if capacity is not None and len(self.index) >= capacity and not self.evict(keys[:depth]):
                    break
                self.index.add(key, depth, 1, keys[depth - 1] if depth else None)
        self.index.take_times(0)  # as upkeep does every other second: storing is a use of what is before
        return hits

    def evict(self, spare=()):
        return [key for key, _ in self.index.take_coldest(1, 0, 1, frozenset(spare))]


def traffic(world, capacity, seconds, seed=1):
    """Sessions of which one in ten comes back, again and again, every minute; the others never."""
    generator = random.Random(seed)
    returning = []
    hits = 0
    for second in range(seconds):
        world.now += 1
        keys = prefix(f"{seed}-{second}", 4)
        world.request(keys, capacity)
        if generator.random() < 0.1:
            returning.append((second, keys))
        hits += sum(
            world.request(keys, capacity)
            for since, keys in returning[-20:]
            if second > since and not (second - since) % 60
        )
    return hits


def test_what_is_asked_for_again_outlives_what_is_not():
    """On a disk too small for a minute's chunks, LRU keeps none until it returns; what has returned once is kept."""
    hits = {policy: traffic(World(make), 120, 3000) for policy, make in (
        ("density", HitDensity), ("lru", lambda _: TailFirstLru()))}  # fmt: skip
    assert hits["density"] > 3 * max(hits["lru"], 100)


def test_before_anything_is_learned_the_order_is_that_of_the_last_use():
    """A new store behaves like the simple policy."""
    world = World()
    first, second = prefix("first", 3), prefix("second", 2)
    world.request(first)
    world.now += 1
    world.request(second)
    world.now += 1
    world.request(first)
    assert world.index.coldest_first() == [*reversed(second), *reversed(first)]


def test_one_request_is_one_use_however_often_it_asks():
    """A waiting request is looked up again at every step."""
    world = World()
    keys = prefix("waiting", 2)
    world.request(keys)
    world.now += 60
    for _ in range(50):
        world.index.use_prefix(keys, pin=False)
        world.now += 0.05
    assert [state >> 2 & 3 for state in known(world.policy).values()] == [1, 1]


def test_a_use_by_the_same_request_is_no_return():
    """Loading what was looked up, and storing what follows it, refreshes and does not count."""
    world = World()
    keys = prefix("long", 3)
    world.request(keys[:2])
    world.now += 100
    assert world.index.use(keys[0])
    world.index.add(keys[2], 2, 1, keys[1])
    world.index.coldest_first()
    assert all(state >> 2 & 3 == 0 for state in known(world.policy).values())


def test_a_chunk_that_went_goes_on_counting_its_uses():
    """Its ghost remembers, so that what returns after all is kept longer than what is new."""
    world = World()
    keys = prefix("again", 2)
    world.request(keys)
    assert sorted(world.evict() + world.evict()) == sorted(keys)
    world.now += 100
    assert world.request(keys) == 0
    assert [state >> 2 & 3 for state in known(world.policy).values()] == [1, 1]


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
steps = st.lists(st.tuples(paths, st.sampled_from((0, 1, 3, 40, 700))), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 12))
def test_no_chunk_goes_before_one_that_depends_on_it(walk, capacity):
    """Whatever was asked for when, and whatever was learned from it: the tail goes before its head."""
    world = World()
    above = {}
    for path, pause in walk:
        world.now += pause
        keys = [digest_fields(*path[: depth + 1]) for depth in range(len(path))]
        above.update({key: keys[:depth] for depth, key in enumerate(keys)})
        world.request(keys)
        while len(world.index) > capacity:
            (victim,) = world.evict()
            orphans = [key for key in above if victim in above[key] and key in world.index]
            assert not orphans


def test_order_and_uses_survive_a_restart():
    """A policy that is given what another one knew evicts in the same order."""
    world = World()
    traffic(world, 200, 900)
    order = world.index.coldest_first()
    fresh = HitDensity(lambda: world.now)
    found, states = world.policy.frozen()()
    keys = list(found)
    fresh.load(keys, [states.get(key, 0) for key in keys])
    fresh._returns = world.policy._returns
    assert [key for key in fresh.coldest()][:50] == order[:50]
    assert sorted(fresh.coldest()) == sorted(order)
    assert {key: state >> 1 & 7 for key, state in known(fresh).items()} == {
        key: state >> 1 & 7 for key, state in known(world.policy).items()
    }


@pytest.mark.parametrize("mean_s", [20, 600])
def test_the_rate_of_returns_is_estimated_though_most_still_wait(mean_s):
    """Chunks that have not returned yet count as time in which they could have."""
    returns, generator = Returns(), random.Random(3)
    events = []
    for number in range(3000):
        born = generator.uniform(0, 2000)
        events += [(born, number), (born + 3 + generator.expovariate(1 / mean_s), number)]
    for at, number in sorted(events):
        if at < 2000:
            returns.asked((digest_fields(number),), int(at))
    rates = returns._rates(2000)[0]
    bucket = 1 + int(math.log2(mean_s))
    assert rates[bucket] == pytest.approx(1 / mean_s, rel=0.35)


def test_the_sample_stays_bounded_whatever_is_asked():
    """A million keys cost a megabyte, not a hundred."""
    returns = Returns()
    for number in range(120_000):
        returns.asked((digest_fields("many", number),), number // 200)
    assert len(returns._followed) <= 4096
    assert returns.has_learned
    table = returns.densities(600)
    assert len(table) == CLASSES
    for row in table:
        assert row == sorted(row, reverse=True), "an older chunk is never worth more"
    for kind in range(2, CLASSES):
        assert all(more >= less for more, less in zip(table[kind], table[kind - 2]))


def test_a_key_that_stands_twice_in_a_prefix_does_no_harm():
    """Lookups go on finding it, whatever class it is in."""
    world = World()
    a, b = prefix("twice", 2)
    world.request([a, b])
    for _ in range(6):
        world.now += 10
        assert world.index.use_prefix([a, a, b], pin=False) == 3
    assert sorted(world.index.coldest_first()) == sorted([a, b])


def interrupt(policy, meanwhile):
    """Make a policy do `meanwhile()` while it works out another order."""
    work = policy.ranked

    def ranked(*arguments):
        install = work(*arguments)
        meanwhile()
        return install

    policy.ranked = ranked


@pytest.mark.parametrize("policy", [HitDensity, lambda clock: TailFirstLru()], ids=["density", "lru"])
def test_what_happens_while_the_order_is_worked_out_counts(policy):
    """Chunks looked up, stored, evicted or spared from eviction meanwhile are in the order, or out of it, once."""
    world = World(policy)
    index, keys, new = world.index, prefix("old", 8), prefix("new", 1)[0]
    index.load((key, 0, 1) for key in keys)
    (spared,) = index.take_coldest(1, 0, 1, ())
    order = [key for key in reversed(keys) if key != spared[0]]
    first, gone, used = order[0], order[1], order[2]

    def meanwhile():
        for step in (
            lambda: index.keep(*spared),
            lambda: index.use_prefix([used], pin=False),
            lambda: index.discard(gone),
            lambda: index.add(new, 0, 1),
        ):
            world.now += 1
            step()

    world.now += 100
    index.discard(first)
    index.add(first, 0, 1, stored=False)
    interrupt(world.policy, meanwhile)
    index.rank(order)
    assert index.coldest_first()[: len(order) - 3] == order[3:]
    assert index.coldest_first()[len(order) - 3 :] == [first, spared[0], used, new]
    assert len(index) == len(index.coldest_first())
    assert index.use_prefix([first, spared[0], used, new], pin=False) == 4


@pytest.mark.parametrize("policy", [HitDensity, lambda clock: TailFirstLru()], ids=["density", "lru"])
def test_lookups_go_on_while_a_snapshot_or_an_order_is_worked_out(policy):
    """The work that grows with the number of chunks is done without the lock; what moves meanwhile is there once."""
    world = World(policy)
    index, keys = world.index, prefix("k", 8)
    world.request(keys)
    world.now += 10
    freeze = world.policy.frozen

    def frozen():
        work = freeze()

        def later():
            assert not index._lock.locked()
            world.now += 10
            index.use_prefix(keys[:2], pin=False)
            index.discard(keys[7])
            return work()

        return later

    world.policy.frozen = frozen
    found = index.snapshot(closed=False)
    assert sorted(found.keys) == sorted(keys[:7])
    assert [key for key in found.keys if key in keys[2:7]] == keys[6:1:-1]
    assert list(found.depths) == [keys.index(key) for key in found.keys]
