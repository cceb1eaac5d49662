"""Every call of the operating system fails, in turn: the outcome is a miss or a drop, and nothing leaks."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from store_helpers import (
    OTHER_NAMESPACE,
    disk_bytes,
    holds,
    open_descriptors,
    open_store,
    prefix,
    put,
    put_prefix,
    temporaries,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import PutResult, osio

CALLS = (
    "open", "close", "preadv", "pwritev", "pread", "pwrite", "fdatasync", "fstat", "lstat", "fchmod", "chmod",
    "rename", "unlink", "mkdir", "rmdir", "listdir", "utime", "flock",
)  # fmt: skip
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ESTALE)


class Fault:
    """Makes the N-th call of one function fail, and the later ones too where `for_good`.

    A failing close closes all the same, as the kernel does.
    """

    def __init__(self, monkeypatch, name, nth, code, for_good):
        self.name, self.nth, self.code, self.for_good = name, nth, code, for_good
        self.count = 0
        self.fired = False
        self.real = getattr(osio, name)
        self.lock = threading.Lock()
        monkeypatch.setattr(osio, name, self)

    def __call__(self, *arguments):
        with self.lock:
            self.count += 1
            fire = self.nth and (self.count == self.nth or (self.for_good and self.count > self.nth))
        if fire:
            self.fired = True
            if self.name == "close":
                self.real(*arguments)
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments)

    def stop(self):
        self.nth = 0


def use_everything(store):
    """One of each: a lookup, loads, stores with and without an eviction, removals, upkeep."""
    store.match(prefix("old", 3), pin=True)
    for key in prefix("old", 3):
        holds(store, key)
        store.unpin(key)
    put_prefix(store, prefix("new", 4))
    put_prefix(store, prefix("newer", 2))
    store.remove(prefix("new", 4)[0])
    store._upkeep._flush(100)
    store._upkeep._mark_use()
    store._upkeep._restore()
    store._upkeep._trim()
    store.contains(prefix("absent", 1)[0])
    store.usage()


def check_recovered(store, root):
    """With the fault gone: account and disk agree, nothing is reserved or left, and the next operations work."""
    store._writer.settle()
    with store._account.locked(5):
        pass
    assert store.usage().reserved_bytes == 0
    assert temporaries(root) == []
    assert store.usage().used_bytes == disk_bytes(root)
    keys = prefix("after", 2)
    assert put_prefix(store, keys) == [PutResult.STORED] * 2
    assert store.match(keys) == 2 and all(holds(store, key) for key in keys)
    assert store.usage().used_bytes == disk_bytes(root)


def fill(root):
    with open_store(root, quota_chunks=6, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("other", 1))


@pytest.mark.parametrize(
    ("call", "code"),
    [(call, errno.EIO) for call in CALLS] + [(call, errno.ENOSPC) for call in ("open", "pwritev", "pwrite", "rename")],
)
def test_one_failing_call_costs_a_chunk_at_most(fast_root, monkeypatch, call, code):
    """Every N from the first to the last call of each kind."""
    fill(fast_root)
    nth = 0
    while True:
        nth += 1
        with open_store(fast_root, quota_chunks=6, fsync="data" if call == "fdatasync" else "none") as store:
            store._upkeep._stopping.set()
            store._upkeep._thread.join()
            put_prefix(store, prefix("old", 3))
            descriptors = open_descriptors()
            with monkeypatch.context() as patch:
                fault = Fault(patch, call, nth, code, for_good=False)
                use_everything(store)
            assert open_descriptors() <= descriptors, f"{call} number {nth} leaks a descriptor"
            assert disk_bytes(fast_root) <= store.usage().quota_bytes
            check_recovered(store, fast_root)
            store.clear()
        if not fault.fired:
            break
    assert nth > 1 or call in ("chmod", "mkdir", "rmdir", "close")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", ERRORS)
def test_a_call_that_fails_for_good_is_misses_and_drops_until_it_works_again(fast_root, monkeypatch, call, code):
    """A dying disk, a read-only remount, no descriptors left."""
    fill(fast_root)
    with open_store(fast_root, quota_chunks=6) as store:
        store._upkeep._stopping.set()
        store._upkeep._thread.join()
        put_prefix(store, prefix("old", 3))
        descriptors = open_descriptors()
        with monkeypatch.context() as patch:
            Fault(patch, call, 1, code, for_good=True)
            use_everything(store)
            use_everything(store)
        assert open_descriptors() <= descriptors
        assert disk_bytes(fast_root) <= store.usage().quota_bytes
        check_recovered(store, fast_root)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("for_good", [False, True])
def test_an_open_that_meets_a_failing_call_works_or_says_so(fast_root, monkeypatch, call, for_good):
    """`ConfigError` and nothing else; no descriptor and no session is left behind, and the next open works."""
    with open_store(fast_root) as store:
        put_prefix(store, prefix("old", 3))
    descriptors = open_descriptors()
    nth = 0
    while True:
        nth += 1
        with monkeypatch.context() as patch:
            fault = Fault(patch, call, nth, errno.EIO, for_good)
            try:
                with open_store(fast_root) as store:
                    fault.stop()
                    store._writer.settle()
                    assert store.match(prefix("old", 3)) in (0, 1, 2, 3)
                    assert store.usage().used_bytes == disk_bytes(fast_root)
            except ConfigError as error:
                assert error.setting in ("nvme.path", "nvme.direct_io")
        assert open_descriptors() == descriptors, f"{call} number {nth} leaks a descriptor"
        with open_store(fast_root) as store:
            assert store.match(prefix("old", 3)) == 3
            assert temporaries(fast_root) == []
        if not fault.fired:
            break


def test_a_full_disk_evicts_and_tries_once_more(root, monkeypatch):
    """A quota larger than the disk must not stop the cache, nor turn into a loop."""
    real = osio.pwritev
    full = {"times": 0}

    def no_space(fd, buffers, offset):
        if full["times"] and len(buffers) > 1:
            full["times"] -= 1
            raise OSError(errno.ENOSPC, "full")
        return real(fd, buffers, offset)

    monkeypatch.setattr(osio, "pwritev", no_space)
    old, new = prefix("old", 4), prefix("new", 3)
    with open_store(root, quota_chunks=20) as store:
        put_prefix(store, old)
        full["times"] = 1
        assert put(store, new[0]) is PutResult.STORED
        assert store.match(old) == 2
        full["times"] = 2
        assert put(store, new[1]) is PutResult.NO_SPACE
        assert full["times"] == 0
        assert put(store, new[2]) is PutResult.STORED
        assert temporaries(root) == [] and store.usage().reserved_bytes == 0
        assert store.usage().used_bytes == disk_bytes(root)


def test_a_temporary_that_cannot_be_removed_keeps_its_room(root, monkeypatch):
    """The quota counts what is on the disk, until it really goes."""
    with open_store(root, quota_chunks=2) as store:
        with monkeypatch.context() as patch:
            Fault(patch, "rename", 1, errno.EIO, for_good=True)
            Fault(patch, "unlink", 1, errno.EIO, for_good=True)
            assert put(store, prefix("a", 1)[0]) is PutResult.IO_ERROR
        assert len(temporaries(root)) == 1
        usage = store.usage()
        assert usage.used_bytes + usage.reserved_bytes == disk_bytes(root)
        store._writer.settle()
        assert temporaries(root) == [] and store.usage().reserved_bytes == 0
