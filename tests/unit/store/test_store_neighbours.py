"""What stores of one namespace see of each other when one of them comes, goes or is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from store_helpers import (
    NAMESPACE,
    aligned,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
    session_files,
)

from lmcache_nvme_backend.store import PutResult, osio, recovery, session

STORES_AND_WAITS = """
store = open_store(root)
say("open"); sys.stdin.readline()
put_prefix(store, prefix("left", 5)); say("stored")
sys.stdin.readline()
store.close(); say("closed")
"""


@pytest.mark.parametrize("ends", ["killed", "closed"])
@pytest.mark.parametrize("noticed", [True, False], ids=["seen alive", "never seen alive"])
def test_what_a_store_left_behind_is_found_after_its_end(root, start_child, ends, noticed):
    """A process that stores and is gone before the next lookup of another one has not worked for nothing."""
    keys = prefix("left", 5)
    with open_store(root) as store:
        assert store.match(keys) == 0
        child = start_child(STORES_AND_WAITS, root)
        assert child.stdout.readline() == "open\n"
        if noticed:
            assert store.match(keys) == 0
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stored\n"
        if ends == "killed":
            child.kill()
        else:
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "closed\n"
        child.wait()
        for path in session_files(root):  # as a third process's eviction does
            if ends == "killed" and path.name != store._session.id:
                path.unlink()
        assert store.match(keys) == 5
        assert all(holds(store, key) for key in keys)


def test_a_session_that_takes_its_time_to_lock_its_file_is_noticed(root, monkeypatch):
    """Between the two a lookup takes it for dead, and that is not the last word."""
    keys = prefix("slow", 2)
    with open_store(root) as one:
        real = session._lock_own

        def slowly(fd):
            file = next(path for path in session_files(root) if path.name != one._session.id)
            while time.time_ns() - file.parent.stat().st_mtime_ns < 100_000_000:
                time.sleep(0.01)
            assert one.match(keys) == 0 and not one._watcher._shared
            real(fd)

        monkeypatch.setattr(session, "_lock_own", slowly)
        with open_store(root) as two:
            assert one.match(keys) == 0
            put_prefix(two, keys)
            assert one.match(keys) == 2


def test_a_chunk_of_an_unusual_size_is_found_at_once(root):
    """Not by its name, which nobody can guess, but by a listing."""
    keys = prefix("sizes", 6)
    with open_store(root) as one, open_store(root) as two:
        for depth, key in enumerate(keys):
            nbytes = 5000 * (depth + 1)
            view = aligned(payload_of(key, nbytes))
            assert two.put(key, view, depth=depth, tokens=256) is PutResult.STORED
            assert one.match(keys) == depth + 1


def test_a_prefix_of_usual_chunks_is_found_without_listing_a_directory(root, monkeypatch):
    """Nor does a lookup list one that has not changed since the index knew all of it."""
    before, after = prefix("before", 3), prefix("after", 40)
    with open_store(root) as one, open_store(root) as two:
        put_prefix(one, before)
        put_prefix(two, after)
        assert one.match(before) == 3 and one.match(after[:1]) == 1  # the usual size is known
        listed = []
        real = recovery.list_dir_or_raise
        monkeypatch.setattr(recovery, "list_dir_or_raise", lambda path: listed.append(path) or real(path))
        assert one.match(after) == 40
        assert listed == []


def test_listings_of_large_directories_are_held_to_a_share_of_the_time(root, monkeypatch):
    """A miss in a huge namespace that others write to must not hold the engine up each time."""
    monkeypatch.setattr("lmcache_nvme_backend.store.watcher.CHEAP_LISTING", 0)
    monkeypatch.setattr("lmcache_nvme_backend.store.watcher.LISTING_PAUSE_S", 3600)
    keys = prefix("many", 3)
    with open_store(root) as one, open_store(root) as two:
        put(two, keys[0])
        assert one.match(keys[:1]) == 1  # listed
        view = aligned(payload_of(keys[1], 9000))
        assert two.put(keys[1], view, depth=7) is PutResult.STORED
        assert one.match(keys) == 1  # neither guessed nor listed now
        one._watcher._no_listing_before = 0.0
        assert one.match(keys) == 2


def test_an_error_while_looking_is_no_proof_of_absence(root, monkeypatch):
    """The directory is listed again once that works."""
    keys = prefix("later", 2)
    with open_store(root) as one, open_store(root) as two:
        assert one.match(keys) == 0
        put_prefix(two, keys)
        real = osio.listdir

        def failing(path):
            if path.startswith(one.directory + "/"):
                raise OSError(24, "too many open files")
            return real(path)

        monkeypatch.setattr(osio, "listdir", failing)
        assert one.match(keys) == 0
        monkeypatch.setattr(osio, "listdir", real)
        assert one.match(keys) == 2


FORKS = """
store = open_store(root, quota_chunks=4)
put_prefix(store, prefix("kept", 2))
with store._account.locked(1):
    child = os.fork()
    if child == 0:
        say("forked", os.getpid())
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def test_a_lock_does_not_outlive_its_process_in_a_child_that_it_forked(root, start_child):
    """Neither the root's nor the session's, though a forked child has the same open files."""
    parent = start_child(FORKS, root)
    word, pid = parent.stdout.readline().split()
    try:
        assert word == "forked"
        parent.kill()
        os.waitpid(parent.pid, 0)
        with open_store(root, quota_chunks=4, lock_wait_s=5.0) as store:
            assert len(session_files(root)) == 1
            assert store.match(prefix("kept", 2)) == 2
            assert put_prefix(store, prefix("new", 2)) == [PutResult.STORED] * 2
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_a_store_in_a_forked_child_takes_nothing_of_its_parents_away(root):
    """Its close leaves the parent's session alone, and what it stores is dropped."""
    keys = prefix("parent", 3)
    with open_store(root) as store:
        put_prefix(store, keys[:2])
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                put(store, keys[2], 2, keys[1])
                store.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [path.name for path in session_files(root)] == [store._session.id]
        assert [peer.namespace for peer in session.live_peers(store._layout)] == [NAMESPACE.digest]
        assert put(store, keys[2], 2, keys[1]) in (PutResult.STORED, PutResult.EXISTS)
        assert all(holds(store, key) for key in keys)


def test_depths_that_are_no_positions_are_found_by_name_as_well(root, monkeypatch):
    """A hybrid model's chunks are numbered along an order of their own: told the depths, a lookup lists nothing."""
    keys, depths = prefix("hybrid", 30), [7 * i + 3 for i in range(30)]
    with open_store(root) as one, open_store(root) as two:
        for key, depth in zip(keys, depths, strict=True):
            put(two, key, depth)
        assert one.match(keys[:1], depths=depths[:1]) == 1
        monkeypatch.setattr(recovery, "list_dir_or_raise", lambda path: pytest.fail(f"{path} was listed"))
        assert one.match(keys, depths=depths) == 30


def test_asking_before_a_store_lists_no_directory(root, monkeypatch):
    """What another process has stored is found by its likely name; what has an unlikely one is found by the put."""
    usual, odd, nowhere = prefix("usual", 3), prefix("odd", 1)[0], prefix("nowhere", 1)[0]
    with open_store(root) as one, open_store(root) as two:
        put_prefix(two, usual)
        assert one.match(usual[:1]) == 1
        assert two.put(odd, aligned(payload_of(odd, 9000)), depth=0) is PutResult.STORED
        monkeypatch.setattr(recovery, "list_dir_or_raise", lambda path: pytest.fail(f"{path} was listed"))
        assert one.contains(usual[2], depth=2)
        assert not one.contains(odd) and not one.contains(nowhere)
        assert one.put(odd, aligned(payload_of(odd, 9000)), depth=0) is PutResult.EXISTS
