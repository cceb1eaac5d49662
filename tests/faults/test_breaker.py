"""A store whose disk fails steps aside, and comes back by itself."""

from __future__ import annotations

import errno
import os
import time

import pytest

from lmcache_nvme_backend.store import MissCause, PutResult, osio
from lmcache_nvme_backend.store.breaker import ERRORS_TO_OPEN
from tests.faults.support.injection import Fault
from tests.unit.store.store_helpers import (
    PAYLOAD,
    aligned,
    disk_bytes,
    holds,
    open_descriptors,
    open_store,
    prefix,
    put,
    put_prefix,
    temporaries,
)

KEYS = prefix("kept", 4)
LONG = prefix("kept", 4 + ERRORS_TO_OPEN)


def probe_now(store):
    store._breaker._probe_at = 0
    store._breaker.try_again()


@pytest.mark.parametrize(
    ("call", "code"),
    [("preadv", errno.EIO), ("open", errno.EMFILE), ("open", errno.ESTALE), ("fstat", errno.EIO)],
)
def test_loads_that_keep_failing_turn_every_lookup_into_a_miss(root, monkeypatch, call, code):
    """No call reaches the disk then, and when it works again all is there."""
    with open_store(root) as store:
        put_prefix(store, LONG)
        with monkeypatch.context() as patch:
            fault = Fault(patch, call, 1, code, for_good=True)
            for key in LONG[4:]:
                assert not store.stands_aside and store.match(KEYS) == 4
                assert not holds(store, key)
            assert store.stands_aside
            asked = fault.count
            assert store.match(KEYS) == 0 and not store.contains(KEYS[0]) and not store.pin(KEYS[0])
            assert store.get(KEYS[1], aligned(bytes(PAYLOAD))).cause is MissCause.ASIDE
            assert put(store, prefix("new", 1)[0]) is PutResult.ASIDE
            assert fault.count == asked, "the disk was asked"
            probe_now(store)
            assert store.stands_aside and fault.count > asked
        probe_now(store)
        assert not store.stands_aside
        assert store.match(KEYS) == 4 and all(holds(store, key) for key in KEYS)
        assert temporaries(root) == [] and store.usage().used_bytes == disk_bytes(root)


@pytest.mark.parametrize(
    ("call", "code"),
    [("pwritev", errno.EIO), ("rename", errno.EROFS), ("pread", errno.EIO), ("open", errno.EROFS)],
)
def test_stores_that_keep_failing_are_not_tried_for_ever(root, monkeypatch, call, code):
    """Writes that fail, a publication that fails, an account that cannot be read."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        descriptors = open_descriptors()
        with monkeypatch.context() as patch:
            Fault(patch, call, 1, code, for_good=True)
            results = [put(store, key) for key in prefix("new", ERRORS_TO_OPEN + 3)]
            assert results == [PutResult.IO_ERROR] * ERRORS_TO_OPEN + [PutResult.ASIDE] * 3
            assert open_descriptors() <= descriptors
        probe_now(store)
        assert put(store, prefix("new", 1)[0]) is PutResult.STORED
        store._writer.settle()
        assert temporaries(root) == [] and store.usage().used_bytes == disk_bytes(root)
        assert store.usage().reserved_bytes == 0


def test_a_full_disk_is_no_reason_to_step_aside(root, monkeypatch):
    """Its chunks still load, and eviction deals with it."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        pins = store.match(KEYS, pin=True)
        with monkeypatch.context() as patch:
            Fault(patch, "pwritev", 1, errno.ENOSPC, for_good=True)
            results = {put(store, key) for key in prefix("new", 3 * ERRORS_TO_OPEN)}
            assert results == {PutResult.NO_SPACE} and not store.stands_aside
            assert pins == 4 and all(holds(store, key) for key in KEYS)


def test_the_store_comes_back_by_itself(root, monkeypatch):
    """Its own thread probes: nobody has to ask, and no restart is needed."""
    monkeypatch.setattr("lmcache_nvme_backend.store.upkeep.UPKEEP_INTERVAL_S", 0.02)
    monkeypatch.setattr("lmcache_nvme_backend.store.breaker.PROBE_AFTER_S", 0.05)
    with open_store(root) as store:
        put_prefix(store, LONG)
        with monkeypatch.context() as patch:
            fault = Fault(patch, "preadv", 1, errno.EIO, for_good=True)
            for key in LONG[4:]:
                holds(store, key)
            probes = fault.count + 3
            wait_until(lambda: fault.count >= probes)
            assert store.stands_aside
        wait_until(lambda: not store.stands_aside)
        assert store.match(KEYS) == 4 and all(holds(store, key) for key in KEYS)


def test_a_store_that_stands_aside_closes_at_once(root, monkeypatch):
    """Without a last look at the disk for every chunk."""
    with open_store(root) as store:
        put_prefix(store, LONG)
        store.match(LONG)
        Fault(monkeypatch, "preadv", 1, errno.EIO, for_good=True)
        for key in LONG[4:]:
            holds(store, key)
        times = Fault(monkeypatch, "utime", 0, 0, for_good=False)
        store.close()
        assert times.count == 0
        assert store.usage().used_bytes == 0 and not store.contains(KEYS[0])


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_chunk_on_a_bad_sector_costs_no_other_chunk(root, monkeypatch):
    """It is removed, so that no lookup promises it again; the rest is served, and the store stays in service."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        bad = store._layout.chunk(store.namespace.digest, KEYS[3], 3, store._index.get(KEYS[3]).blocks)
        real, bad_fds = osio.open, set()
        read = osio.preadv

        def opened(path, flags, mode=0o600):
            fd = real(path, flags, mode)
            (bad_fds.add if path == bad and not flags & os.O_CREAT else bad_fds.discard)(fd)
            return fd

        def failing(fd, buffers, offset):
            if fd in bad_fds:
                raise OSError(errno.EIO, "bad sector")
            return read(fd, buffers, offset)

        monkeypatch.setattr(osio, "open", opened)
        monkeypatch.setattr(osio, "preadv", failing)
        assert store.match(KEYS) == 4
        assert [holds(store, key) for key in KEYS] == [True, True, True, False]
        assert store.stats.corrupt[MissCause.UNREADABLE] == 1
        assert store.match(KEYS) == 3 and store.usage().used_bytes == disk_bytes(root)
        bad = ""
        assert put(store, KEYS[3], 3, KEYS[2]) is PutResult.STORED
        assert store.match(KEYS) == 4 and all(holds(store, key) for key in KEYS)
        assert not store.stands_aside
