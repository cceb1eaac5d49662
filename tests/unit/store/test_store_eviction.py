"""Whose chunks go when room is needed, and in which order."""

from __future__ import annotations

import os
import time

import pytest
from store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    aligned,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
)

from lmcache_nvme_backend.store import Namespace, PutResult
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.policy import TailFirstLru


def present(store, keys):
    return [key in store._index for key in keys]


def test_the_tail_of_a_prefix_goes_before_its_head(root):
    """A chunk is useless without its predecessors."""
    old, new = prefix("old", 5), prefix("new", 3)
    with open_store(root, quota_chunks=5) as store:
        put_prefix(store, old)
        put_prefix(store, new)
        assert present(store, old) == [True, True, False, False, False]
        assert present(store, new) == [True] * 3
        assert store.stats.evictions == 3


def test_the_prefix_unused_for_longest_goes_first(root):
    """A lookup is a use."""
    first, second, third = prefix("first", 2), prefix("second", 2), prefix("third", 2)
    with open_store(root, quota_chunks=4) as store:
        put_prefix(store, first)
        put_prefix(store, second)
        assert store.match(first) == 2
        put_prefix(store, third)
        assert (store.match(first), store.match(second), store.match(third)) == (2, 0, 2)


def test_a_lookup_of_a_longer_prefix_refreshes_what_it_found(root):
    """The missing tail does not matter."""
    first, second = prefix("first", 3), prefix("second", 2)
    with open_store(root, quota_chunks=4) as store:
        put_prefix(store, first[:2])
        put_prefix(store, second)
        assert store.match(first) == 2
        put(store, prefix("third", 1)[0])
        assert present(store, second) == [True, False]


def test_storing_a_chunk_refreshes_its_predecessors(root):
    """An answer that grows a long prefix by one chunk keeps the whole prefix."""
    long, other = prefix("long", 4), prefix("other", 2)
    with open_store(root, quota_chunks=6) as store:
        put_prefix(store, long[:3])
        put_prefix(store, other)
        put(store, long[3], depth=3, parent=long[2])
        assert store._index.coldest_first() == [*reversed(other), *reversed(long)]
        put(store, prefix("new", 1)[0])
        assert (store.match(long), store.match(other)) == (4, 1)


def test_a_chunk_is_dropped_rather_than_evict_its_own_predecessors(root):
    """Without them it would be worth nothing."""
    keys = prefix("too long", 6)
    with open_store(root, quota_chunks=4) as store:
        results = put_prefix(store, keys[:5])
        assert results == [PutResult.STORED] * 4 + [PutResult.QUOTA]
        assert store.match(keys) == 4


def test_a_pinned_chunk_is_never_evicted(root):
    """Pins count: two pins need two unpins."""
    keys, other = prefix("pinned", 3), prefix("other", 4)
    with open_store(root, quota_chunks=3) as store:
        put_prefix(store, keys)
        assert store.match(keys, pin=True) == 3
        assert store.contains(keys[0], pin=True) and store.pin(keys[0])
        assert put(store, other[0]) is PutResult.QUOTA
        assert [store.unpin(key) for key in keys] == [True] * 3
        assert put_prefix(store, other[:3]) == [PutResult.STORED, PutResult.STORED, PutResult.QUOTA]
        assert present(store, keys) == [True, False, False]
        assert store.unpin(keys[0]) and store.unpin(keys[0])
        assert put(store, prefix("new", 1)[0]) is PutResult.STORED
        assert present(store, keys) == [False] * 3


def test_pins_of_what_is_not_there_are_refused_and_never_raise(root):
    """An unpin that nobody is waiting for is False."""
    key = prefix("absent", 1)[0]
    with open_store(root) as store:
        assert not store.pin(key) and not store.unpin(key) and not store.contains(key, pin=True)
        put(store, key)
        assert not store.unpin(key)
        assert store.pin(key)
        assert store.remove(key)
        assert store.unpin(key) and not store.unpin(key)


def test_a_chunk_larger_than_the_quota_evicts_nothing(root):
    """It could never fit."""
    key, large = prefix("small", 1)[0], prefix("large", 1)[0]
    with open_store(root, quota_chunks=3) as store:
        put(store, key)
        assert store.put(large, aligned(bytes(3 * CHUNK_FILE)), depth=0) is PutResult.QUOTA
        assert holds(store, key)


def test_recency_survives_a_restart(root):
    """The order of eviction is the same after a close and an open."""
    prefixes = [prefix(name, 4) for name in "abc"]
    with open_store(root) as store:
        for keys in prefixes:
            put_prefix(store, keys)
        for keys in (prefixes[1], prefixes[0]):
            store.match(keys)
        order = store._index.coldest_first()
    assert order == [key for keys in (prefixes[2], prefixes[1], prefixes[0]) for key in reversed(keys)]
    with open_store(root) as store:
        assert store._index.coldest_first() == order


def test_recency_reaches_the_disk_without_a_close(root, start_child):
    """What was used is known after a SIGKILL, but for the last seconds."""
    child = start_child(
        """
store = open_store(root)
for name in "ab":
    put_prefix(store, prefix(name, 3))
store.match(prefix("a", 3))
before = [chunk_path(store, key).stat().st_mtime_ns for key in prefix("a", 3)]
while len({chunk_path(store, key).stat().st_mtime_ns for key in prefix("a", 3)}) > 1:
    time.sleep(0.01)
say("on disk")
time.sleep(60)
""",
        root,
    )
    assert child.stdout.readline() == "on disk\n"
    child.kill()
    child.wait()
    with open_store(root) as store:
        assert store._index.coldest_first()[-3:] == list(reversed(prefix("a", 3)))


def test_a_large_index_is_ranked_in_the_background(root, monkeypatch):
    """Lookups work at once; what was used before the ranking ended stays the most recent."""
    old, older = prefix("old", 3), prefix("older", 3)
    with open_store(root) as store:
        put_prefix(store, older)
        put_prefix(store, old)
        store.match(old)
    monkeypatch.setattr("lmcache_nvme_backend.store.upkeep.RANK_AT_OPEN", 0)
    with open_store(root) as store:
        assert store.match(older) == 3
        deadline = time.monotonic() + 30
        while not store._upkeep._ranked and time.monotonic() < deadline:
            time.sleep(0.005)
        assert store._index.coldest_first() == [*reversed(old), *reversed(older)]


def test_a_namespace_that_nobody_has_open_goes_first(root):
    """A dead model's chunks never hold the quota, however recent they are; and the oldest model goes first."""
    models = [Namespace({"model": name}) for name in ("oldest", "older")]
    mine, theirs = prefix("mine", 4), prefix("theirs", 3)
    with open_store(root, quota_chunks=9) as store:
        put_prefix(store, mine[:2])
        for age, namespace in zip((2000, 1000), models):
            with open_store(root, quota_chunks=9, namespace=namespace) as other:
                put_prefix(other, theirs)
            description = root / "v1" / namespace.digest / "namespace.json"
            os.utime(description, (time.time() - age,) * 2)
        assert store.usage().used_bytes == 8 * CHUNK_FILE
        put_prefix(store, mine)
        left = [len(list((root / "v1" / namespace.digest).rglob("*.kv"))) for namespace in models]
        assert left == [2, 3]
        put_prefix(store, prefix("more", 2))
        left = [len(list((root / "v1" / namespace.digest).rglob("*.kv"))) for namespace in models]
        assert left == [0, 3]
        put_prefix(store, prefix("most", 3))
        assert present(store, mine) == [True] * 4
        assert not (root / "v1" / models[0].digest).exists()
        assert store.usage().used_bytes == disk_bytes(root) <= 9 * CHUNK_FILE


def test_a_dead_namespace_loses_its_tail_first(root):
    """Its model may come back."""
    keys = prefix("dead", 4)
    with open_store(root, quota_chunks=5, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, keys)
    with open_store(root, quota_chunks=5) as store:
        put_prefix(store, prefix("live", 3))
    with open_store(root, quota_chunks=5, namespace=OTHER_NAMESPACE) as other:
        assert other.match(keys) == 2


def test_a_newcomer_gets_its_fair_share_of_a_full_root(root):
    """It takes from the live namespace that holds more than its share, tail first, and no more than the share."""
    theirs, mine = prefix("theirs", 8), prefix("mine", 6)
    with open_store(root, quota_chunks=8, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, theirs)
        other._upkeep._flush(100)
        with open_store(root, quota_chunks=8) as store:
            assert put_prefix(store, mine[:4]) == [PutResult.STORED] * 4
            assert other.match(theirs) == 4
            assert put(store, mine[4], 4, mine[3]) is PutResult.QUOTA
            assert put(store, prefix("next", 1)[0]) is PutResult.STORED
            assert (store.match(mine), other.match(theirs)) == (3, 4)
            assert disk_bytes(root) == store.usage().used_bytes == 8 * CHUNK_FILE


def test_an_eviction_by_another_store_is_a_miss_and_not_an_error(root):
    """The index drops what it finds gone."""
    keys = prefix("taken", 2)
    with open_store(root) as store:
        put_prefix(store, keys)
        chunk_path(store, keys[0]).unlink()
        assert not holds(store, keys[0])
        assert store.match(keys) == 0
        assert put(store, keys[0]) is PutResult.STORED
        chunk_path(store, keys[1]).unlink()
        assert put(store, keys[1], 1, keys[0]) is PutResult.STORED, "EXISTS would have been a lie"
        assert all(holds(store, key) for key in keys)


@pytest.mark.parametrize("length", [1, 700])
def test_the_policy_keeps_heads_longest(length):
    """The interface alone: a use orders a prefix tail first, whatever its order was before."""
    policy = TailFirstLru()
    keys = prefix("p", length)
    policy.load(keys[: length // 2][::-1])
    for key in keys[length // 2 :]:
        policy.add(key)
    policy.touch(keys)
    assert list(policy.coldest()) == keys[::-1]
    policy.discard(keys[0])
    policy.discard(keys[0])
    assert keys[0] not in list(policy.coldest())


def test_a_loop_of_parents_ends(root):
    """Parents come from outside; depths that do not fall end the walk."""
    index = Index(TailFirstLru())
    a, b = prefix("loop", 2)
    index.add(a, 1, 1, b)
    index.add(b, 1, 1, a)
    assert index.ancestors(a) == [a]
    assert sorted(index.coldest_first()) == sorted([a, b])


def test_a_million_entries_stay_below_300_bytes_each():
    """Entry, key, order and table together, measured by the allocator on a sample of 30,000."""
    import tracemalloc

    count = 30_000
    tracemalloc.start()
    try:
        index = Index(TailFirstLru())
        index.load((payload_of(b"%d" % number, 16), number % 500, 1537) for number in range(count))
        index.rank(index.all_keys())
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / count <= 300


def test_names_and_quota_use_namespace_of_the_store(root):
    """`usage` tells the root's bytes from the namespace's own."""
    with open_store(root) as store, open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(store, prefix("x", 2))
        put_prefix(other, prefix("y", 3))
        usage = store.usage()
        assert (usage.used_bytes, usage.namespace_bytes, usage.namespace_chunks) == (5 * CHUNK_FILE, 2 * CHUNK_FILE, 2)
        assert usage.quota_bytes == 100 * CHUNK_FILE and usage.reserved_bytes == 0
        assert store.clear() == 2
        assert other.usage().used_bytes == 3 * CHUNK_FILE
        assert store.namespace.digest == NAMESPACE.digest


def test_knowing_of_a_chunk_is_no_use_of_it(root):
    """What only asks whether it is there does not keep it; where another store has put it since is found by a look."""
    first, second, third = prefix("first", 2), prefix("second", 2), prefix("third", 2)
    with open_store(root, quota_chunks=5) as store:
        put_prefix(store, first)
        put_prefix(store, second)
        assert all(map(store.known, first)) and not store.known(third[0], look=True)
        put_prefix(store, third)
        assert [store.known(key) for key in (*first, *third)] == [True, False, True, True]
        with open_store(root, quota_chunks=5) as other:
            other.remove(first[0])
            fresh = prefix("fresh", 1)
            put_prefix(other, fresh)
        assert not store.known(fresh[0])
        with open_store(root, quota_chunks=5) as other:
            put_prefix(other, prefix("newest", 1))
            assert store.known(prefix("newest", 1)[0], look=True)
    assert not store.known(third[0])
