"""Many threads at once."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_helpers import (
    CHUNK_FILE,
    PAYLOAD,
    aligned,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    session_files,
)

from lmcache_nvme_backend.store import Hit, PutResult, osio, upkeep


@pytest.fixture
def racy():
    """Threads switch far more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_pinned_prefix_loads_while_others_evict(root, racy):
    """What a lookup has promised with a pin is there, however hard the store is pressed."""
    pinned = prefix("promised", 4)
    with open_store(root, quota_chunks=12) as store:
        for depth, key in enumerate(pinned):
            put(store, key, depth)
        assert store.match(pinned, pin=True) == 4
        stop = threading.Event()

        def press(seed):
            for number in range(10_000):
                if stop.is_set():
                    return
                put(store, prefix(f"press{seed}", number + 1)[-1])

        with ThreadPoolExecutor(4) as threads:
            pressing = [threads.submit(press, seed) for seed in range(3)]
            try:
                for _ in range(150):
                    assert all(holds(store, key) for key in pinned)
            finally:
                stop.set()
            for each in pressing:
                each.result()
        assert store.stats.evictions > 0


def test_one_key_stored_by_many_threads_is_stored_once(root, racy):
    """The others hear that it is being stored, or is there."""
    with open_store(root) as store:
        for number in range(30):
            key = prefix("same", number + 1)[-1]
            barrier = threading.Barrier(4)

            def store_it(key=key, barrier=barrier):
                barrier.wait()
                return put(store, key)

            with ThreadPoolExecutor(4) as threads:
                results = [each.result() for each in [threads.submit(store_it) for _ in range(4)]]
            assert results.count(PutResult.STORED) == 1
            assert set(results) <= {PutResult.STORED, PutResult.BUSY, PutResult.EXISTS}
            assert holds(store, key)
        assert store.usage().used_bytes == disk_bytes(root) == 30 * CHUNK_FILE


def test_a_load_goes_on_while_its_chunk_is_evicted(root, monkeypatch):
    """An open file outlives its name."""
    key = prefix("evicted", 1)[0]
    real = osio.preadv
    with open_store(root) as store:
        put(store, key)

        def evict_first(fd, buffers, offset):
            monkeypatch.setattr(osio, "preadv", real)
            assert store.remove(key)
            return real(fd, buffers, offset)

        monkeypatch.setattr(osio, "preadv", evict_first)
        into = aligned(bytes(PAYLOAD))
        assert store.get(key, into) == Hit(PAYLOAD, 256)
        assert into == payload_of(key)
        assert not store.contains(key)


def test_a_chunk_that_is_found_stored_while_it_is_removed_is_not_promised(root, monkeypatch):
    """A put that comes between finds the file, and finds it gone afterwards: index and disk say the same."""
    key = prefix("both", 1)[0]
    with open_store(root) as store:
        put(store, key)
        real = store._chunks.remove_file

        def put_first(key, entry, inode=None):
            assert put(store, key) is PutResult.EXISTS and store.known(key)
            return real(key, entry, inode)

        monkeypatch.setattr(store._chunks, "remove_file", put_first)
        assert store.remove(key)
        assert not store.known(key) and store.match([key]) == 0
        assert store.usage().used_bytes == disk_bytes(root) == 0


def test_no_lock_is_held_while_bytes_move(root, monkeypatch):
    """A slow disk must not stop lookups, loads or stores of other chunks."""
    slow, quick = prefix("slow", 1)[0], prefix("quick", 2)
    writing, go_on = threading.Event(), threading.Event()
    real = osio.pwritev

    def wait_once(fd, buffers, offset):
        if not writing.is_set():
            writing.set()
            assert go_on.wait(30)
        return real(fd, buffers, offset)

    with open_store(root) as store:
        put(store, quick[0])
        monkeypatch.setattr(osio, "pwritev", wait_once)
        with ThreadPoolExecutor(1) as thread:
            slow_put = thread.submit(put, store, slow)
            assert writing.wait(30)
            assert put(store, quick[1], 1, quick[0]) is PutResult.STORED
            assert store.match(quick) == 2 and all(holds(store, key) for key in quick)
            assert put(store, slow) is PutResult.BUSY
            go_on.set()
            assert slow_put.result() is PutResult.STORED


def test_close_waits_for_calls_in_flight(root, monkeypatch):
    """The write under way is finished, later ones are refused, and the session's file goes."""
    key = prefix("in flight", 1)[0]
    writing, go_on = threading.Event(), threading.Event()
    real = osio.pwritev

    def wait(fd, buffers, offset):
        writing.set()
        assert go_on.wait(30)
        return real(fd, buffers, offset)

    store = open_store(root)
    monkeypatch.setattr(osio, "pwritev", wait)
    with ThreadPoolExecutor(2) as threads:
        in_flight = threads.submit(put, store, key)
        assert writing.wait(30)
        closing = threads.submit(store.close)
        while not store._closed:
            time.sleep(0)
        assert put(store, prefix("late", 1)[0]) is PutResult.CLOSED
        with pytest.raises(TimeoutError):
            closing.result(timeout=0.3)
        assert len(session_files(root)) == 1
        go_on.set()
        assert in_flight.result() is PutResult.STORED
        closing.result()
    assert session_files(root) == []
    monkeypatch.undo()
    with open_store(root) as store:
        assert holds(store, key)


def test_close_does_not_wait_for_a_disk_that_hangs(root, monkeypatch):
    """The background thread is stuck in a call that does not return: close gives it up after its bound."""
    monkeypatch.setattr(upkeep, "UPKEEP_INTERVAL_S", 0.001)
    monkeypatch.setattr(upkeep, "CLOSE_WAIT_S", 0.05)
    stuck, free = threading.Event(), threading.Event()
    store = open_store(root)

    def hang(limit):
        stuck.set()
        free.wait(30)

    monkeypatch.setattr(store._upkeep, "_flush", hang)
    try:
        assert stuck.wait(10)
        closing = threading.Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        free.set()
        store._upkeep._thread.join(10)
    assert not store._upkeep._thread.is_alive()


def test_upkeep_outlives_what_nobody_thought_of(root, monkeypatch, caplog):
    """An error that is no file system's is said once; the background thread goes on, and does its work afterwards."""
    monkeypatch.setattr(upkeep, "UPKEEP_INTERVAL_S", 0.01)
    with open_store(root) as store:
        turns, gone = [], threading.Event()

        def fail():
            turns.append(1)
            if len(turns) < 4:
                raise MemoryError
            gone.set()

        monkeypatch.setattr(store._upkeep, "_restore", fail)
        assert gone.wait(30)
    assert [record.levelname for record in caplog.records if "upkeep of" in record.message] == ["ERROR"]
