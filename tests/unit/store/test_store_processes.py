"""Several processes, and several stores in one, under one root."""

from __future__ import annotations

import fcntl
import os
import time

import pytest
from store_helpers import (
    CHUNK_FILE,
    OTHER_NAMESPACE,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    prefix,
    put,
    put_prefix,
    session_files,
    temporaries,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import PutResult


def test_two_stores_of_one_namespace_find_what_either_stored(root):
    """Two engines with one model, in one process or two: a lookup after a store finds it, at once."""
    keys = prefix("shared", 6)
    with open_store(root) as one, open_store(root) as two:
        put_prefix(one, keys[:3])
        assert two.match(keys) == 3
        assert all(holds(two, key) for key in keys[:3])
        assert put(two, keys[3], 3, keys[2]) is PutResult.STORED
        assert one.match(keys) == 4
        assert put(one, keys[3], 3, keys[2]) is PutResult.EXISTS
        assert holds(one, keys[3])
        for depth in (4, 5):
            put(two, keys[depth], depth, keys[depth - 1])
            assert holds(one, keys[depth])
        assert one.usage().used_bytes == disk_bytes(root) == 6 * CHUNK_FILE


def test_a_chunk_stored_by_both_at_once_is_accounted_once(root):
    """Whoever publishes second finds the other's file."""
    key = prefix("twice", 1)[0]
    with open_store(root) as one, open_store(root) as two:
        assert put(one, key) is PutResult.STORED
        assert put(two, key) is PutResult.EXISTS
        assert holds(two, key)
        assert two.usage().used_bytes == disk_bytes(root) == CHUNK_FILE
        assert two.usage().reserved_bytes == 0 and temporaries(root) == []


def test_a_lookup_does_not_promise_what_another_store_has_evicted(root):
    """The deepest chunk found is looked at while others live."""
    keys = prefix("evicted", 6)
    with open_store(root) as one, open_store(root) as two:
        put_prefix(one, keys)
        assert two.match(keys) == 6
        for key in keys[4:]:
            assert two.remove(key)
        assert one.match(keys) == 4


def test_two_processes_share_root_and_namespace_and_never_pass_the_quota(root, start_child):
    """Both store far more than fits; a third party watches the disk; every byte that either loads is right."""
    program = """
store = open_store(root, quota_chunks=20)
say("ready"); sys.stdin.readline()
hits = stored = 0
for turn in range(60):
    for name in (sys.argv[2], "both"):
        keys = prefix(f"{name}{turn % 12}", 5)
        stored += sum(result is PutResult.STORED for result in put_prefix(store, keys))
        found = store.match(keys, pin=True)
        hits += sum(holds(store, key) for key in keys[:found])
        for key in keys[:found]: store.unpin(key)
say(hits, stored, store.stats.evictions, sum(store.stats.corrupt.values()))
store.close()
"""
    children = [start_child(program, root, name) for name in ("one", "two")]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    worst = 0
    while any(child.poll() is None for child in children):
        worst = max(worst, bytes_now(root, 20 * CHUNK_FILE))
    results = [list(map(int, child.stdout.readline().split())) for child in children]
    assert all(child.returncode == 0 for child in children)
    assert 10 * CHUNK_FILE < worst <= 20 * CHUNK_FILE
    for hits, stored, evictions, corrupt in results:
        assert hits > 0 and stored > 20 and evictions > 0 and corrupt == 0
    with open_store(root, quota_chunks=20) as store:
        assert store.usage().used_bytes == disk_bytes(root)
        assert len(session_files(root)) == 1 and temporaries(root) == []


def bytes_now(root, limit):
    """Bytes of all chunks and temporaries while files come and go. A file that moves between two looks can be counted
    twice, so a sum above the limit is looked at again with the lock held, under which nothing gets a new name."""
    found = disk_bytes(root)
    if found > limit:
        with (root / "v1" / "account").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = disk_bytes(root)
    return found


KILLED_IN_A_WRITE = """
from lmcache_nvme_backend.store import osio
store = open_store(root, quota_chunks=4)
put_prefix(store, prefix("kept", 2))
real = osio.pwritev
def half(fd, buffers, offset):
    real(fd, [buffers[0]], offset)
    say("writing"); time.sleep(60)
osio.pwritev = half
put(store, prefix("lost", 1)[0])
"""

KILLED_IN_THE_LOCK = """
from lmcache_nvme_backend.store import osio
store = open_store(root, quota_chunks=4)
put_prefix(store, prefix("kept", 2))
real = osio.rename
def stuck(source, target):
    if {after}: real(source, target)
    say("writing"); time.sleep(60)
osio.rename = stuck
put(store, prefix("lost", 1)[0])
"""


@pytest.mark.parametrize(
    "program",
    [KILLED_IN_A_WRITE, KILLED_IN_THE_LOCK.format(after=False), KILLED_IN_THE_LOCK.format(after=True)],
    ids=["in a write", "before the rename", "after the rename"],
)
def test_a_killed_process_leaves_no_lock_no_reservation_and_no_temporary(root, start_child, program):
    """The next store opens at once, finds all that was published and can use the whole quota."""
    child = start_child(program, root)
    assert child.stdout.readline() == "writing\n"
    assert len(session_files(root)) == 1
    child.kill()
    child.wait()
    with open_store(root, quota_chunks=4, lock_wait_s=0.5) as store:
        assert temporaries(root) == [] and len(session_files(root)) == 1
        usage = store.usage()
        assert usage.reserved_bytes == 0 and usage.used_bytes == disk_bytes(root)
        assert store.match(prefix("kept", 2)) == 2 and all(holds(store, key) for key in prefix("kept", 2))
        more = prefix("more", 4 - usage.namespace_chunks)
        assert put_prefix(store, more) == [PutResult.STORED] * len(more)
        assert store.stats.evictions == 0


@pytest.mark.parametrize("program", [KILLED_IN_A_WRITE, KILLED_IN_THE_LOCK.format(after=True)])
def test_a_store_that_was_open_all_along_survives_the_others_death(root, start_child, monkeypatch, program):
    """Its own account is right again when it needs the room, without the last resort of a count on suspicion."""
    with open_store(root, quota_chunks=4, namespace=OTHER_NAMESPACE) as store:
        monkeypatch.setattr(store._evictor, "_recount", lambda: False)
        child = start_child(program, root)
        assert child.stdout.readline() == "writing\n"
        child.kill()
        child.wait()
        keys = prefix("survivor", 4)
        assert put_prefix(store, keys) == [PutResult.STORED] * 4
        assert store.usage().used_bytes == disk_bytes(root) == 4 * CHUNK_FILE
        assert store.usage().reserved_bytes == 0 and temporaries(root) == []


HOLDER = """
import fcntl
store = open_store(root)
with store._account.locked(1):
    say("locked"); sys.stdin.readline()
say("free"); sys.stdin.readline()
"""


def test_a_lock_held_too_long_is_one_error_that_names_the_holder(root, start_child):
    """It names the setting and the process; with the lock free again the same open works."""
    child = start_child(HOLDER, root)
    assert child.stdout.readline() == "locked\n"
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        open_store(root, lock_wait_s=0.2)
    assert time.monotonic() - began >= 0.19
    assert caught.value.setting == "nvme.lock_wait_s"
    assert str(child.pid) in str(caught.value) and str(root) in str(caught.value)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "free\n"
    with open_store(root, lock_wait_s=0.2) as store:
        assert put(store, prefix("later", 1)[0]) is PutResult.STORED


def test_open_waits_for_a_process_that_dies(root, start_child):
    """A restart meets the old engine: its lock goes with it."""
    child = start_child(HOLDER, root)
    assert child.stdout.readline() == "locked\n"
    child.kill()
    with open_store(root, lock_wait_s=10) as store:
        child.wait()
        assert put(store, prefix("later", 1)[0]) is PutResult.STORED


def test_a_store_that_cannot_have_the_lock_drops_the_chunk(root, monkeypatch):
    """Bounded, counted, nothing left behind; lookups and loads go on."""
    monkeypatch.setattr("lmcache_nvme_backend.store.writer.STORE_LOCK_WAIT_S", 0.05)
    keys = prefix("dropped", 2)
    with open_store(root) as store:
        put(store, keys[0])
        with (root / "v1" / "account").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert put(store, keys[1]) is PutResult.LOCK_WAIT
            assert store.match(keys) == 1 and holds(store, keys[0])
        assert temporaries(root) == []
        assert put(store, keys[1]) is PutResult.STORED
        assert store.usage().reserved_bytes == 0


def test_a_reservation_that_could_not_be_given_back_is_settled_later(root, monkeypatch):
    """The lock was lost between write and publication."""
    monkeypatch.setattr("lmcache_nvme_backend.store.writer.STORE_LOCK_WAIT_S", 0.05)
    key = prefix("owed", 1)[0]
    with open_store(root) as store:
        lock = (root / "v1" / "account").open("rb")
        real = store._transfer.write

        def take_the_lock(*arguments):
            real(*arguments)
            fcntl.flock(lock, fcntl.LOCK_EX)

        monkeypatch.setattr(store._transfer, "write", take_the_lock)
        assert put(store, key) is PutResult.LOCK_WAIT
        assert store.usage().reserved_bytes == CHUNK_FILE and temporaries(root) == []
        lock.close()
        store._writer.settle()
        assert store.usage().reserved_bytes == 0


def test_a_live_session_is_not_swept(root, start_child):
    """Its temporaries and its reservation stay while it writes."""
    child = start_child(KILLED_IN_A_WRITE, root)
    assert child.stdout.readline() == "writing\n"
    with open_store(root, quota_chunks=4, namespace=OTHER_NAMESPACE) as store:
        assert len(temporaries(root)) == 1
        assert store.usage().reserved_bytes == CHUNK_FILE
        put_prefix(store, prefix("mine", 4))
        assert len(temporaries(root)) == 1
        assert disk_bytes(root) <= 4 * CHUNK_FILE


def test_a_new_engine_shares_the_namespace_of_the_one_that_still_dies(root, start_child):
    """The start never fails for it, and finds its chunks."""
    child = start_child(
        "store = open_store(root); put_prefix(store, prefix('old', 3)); say('up'); time.sleep(60)", root
    )
    assert child.stdout.readline() == "up\n"
    with open_store(root) as store:
        assert store.match(prefix("old", 3)) == 3
        child.kill()
        child.wait()
        assert all(holds(store, key) for key in prefix("old", 3))
        assert put(store, prefix("new", 1)[0]) is PutResult.STORED


def test_a_bad_file_that_was_replaced_meanwhile_is_not_removed(root):
    """Another store has removed it and stored a good one, between this one's look and its removal."""
    key = prefix("replaced", 1)[0]
    with open_store(root) as one, open_store(root) as two:
        put(one, key)
        path = chunk_path(one, key)
        entry = one._index.get(key)
        bad_inode = path.stat().st_ino
        keep = os.open(path, os.O_RDONLY)  # so that the inode's number is not given to the new file
        try:
            assert two.remove(key) or two.match([key])
            two.remove(key)
            put(two, key)
            assert not one._chunks.remove_file(key, entry, bad_inode)
            assert holds(two, key) and holds(one, key)
        finally:
            os.close(keep)


def test_a_chunk_that_another_engine_uses_is_not_the_first_to_go(root):
    """Two engines share a namespace: what one of them uses, the other keeps, though it has no use for it itself."""
    hot, cold, new = prefix("hot", 2), prefix("cold", 2), prefix("new", 2)
    with open_store(root, quota_chunks=4) as one, open_store(root, quota_chunks=4) as two:
        put_prefix(two, hot)
        put_prefix(two, cold)
        assert one.match(hot) == 2
        two._upkeep._flush(100)
        for key in hot:  # as if `one` had used them some seconds later
            later = time.time_ns() + 10_000_000_000
            os.utime(chunk_path(one, key), ns=(later, later))
        put_prefix(two, new)
        assert (two.match(hot), two.match(cold), two.match(new)) == (2, 0, 2)


def test_what_everybody_uses_can_still_be_evicted(root):
    """The respect for others is no way to a full cache."""
    keys, new = prefix("everywhere", 4), prefix("new", 2)
    with open_store(root, quota_chunks=4) as store:
        put_prefix(store, keys)
        store._upkeep._flush(100)
        for key in keys:
            os.utime(chunk_path(store, key), (time.time() + 100,) * 2)
        assert put_prefix(store, new) == [PutResult.STORED] * 2
        assert disk_bytes(root) == 4 * CHUNK_FILE


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(root):
    """A directory's time moves in ticks: one that is fresh proves nothing."""
    first = prefix("tick", 1)[0]
    second = next(key for key in prefix("tock", 5000) if key[0] == first[0])
    with open_store(root) as one, open_store(root) as two:
        put(one, first)
        shard = chunk_path(one, first).parent
        tick = time.time_ns() + 3_000_000_000
        os.utime(shard, ns=(tick, tick))
        assert two.match([first]) == 1
        put(one, second)
        os.utime(shard, ns=(tick, tick))
        assert two.match([second]) == 1
