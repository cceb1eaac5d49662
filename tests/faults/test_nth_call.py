"""Every call of the operating system fails, in turn: the outcome is a miss or a drop, and nothing leaks."""

from __future__ import annotations

import errno
import inspect
import shutil

import pytest

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import PutResult, osio, recovery, upkeep
from tests.faults.support.injection import CALLS, ERRORS, SETTINGS, Fault
from tests.faults.support.verify import wait_until_counted
from tests.faults.support.workload import small_counts_as_large
from tests.unit.store.store_helpers import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chunk_path,
    disk_bytes,
    holds,
    open_descriptors,
    open_store,
    prefix,
    put,
    put_prefix,
    temporaries,
)

# What the seam makes of those calls.
COMPOSED = {
    "write_fully", "read_fully", "make_dir", "make_dir_in_place_of_file", "unlink_quietly", "close_quietly",
    "write_file_atomically",
}  # fmt: skip


def test_no_call_of_the_store_is_left_out():
    """A call that is added to the seam comes into this campaign."""
    functions = {name for name, found in vars(osio).items() if inspect.isfunction(found) and name[0] != "_"}
    assert functions - COMPOSED == set(CALLS)


def use_everything(store):
    """One of each: a lookup, loads, stores with and without an eviction, removals, upkeep."""
    bad = prefix("bad", 1)[0]
    assert not holds(store, bad)
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


def put_bad(store):
    """A chunk that will not pass the check of its bytes."""
    bad = prefix("bad", 1)[0]
    put(store, bad)
    with chunk_path(store, bad).open("r+b") as file:
        file.seek(5000)
        file.write(b"damaged")


def check_recovered(store, root):
    """With the fault gone: account and disk agree, nothing is reserved, left or forgotten, and the store works."""
    if store.stands_aside:
        store._breaker._probe_at = 0  # now, and not in seconds
        store._breaker.try_again()
        assert not store.stands_aside
    store._writer.settle()
    with store._account.locked(5):
        pass
    assert store.usage().reserved_bytes == 0
    assert temporaries(root) == []
    assert store.usage().used_bytes == disk_bytes(root)
    assert chunks_on_disk(root) <= set(store._index.all_keys()), "a chunk that keeps its room and nobody finds"
    keys = prefix("after", 2)
    assert put_prefix(store, keys) == [PutResult.STORED] * 2
    assert store.match(keys) == 2 and all(holds(store, key) for key in keys)
    assert store.usage().used_bytes == disk_bytes(root)


def chunks_on_disk(root):
    directory = root / "v1" / NAMESPACE.digest
    return {bytes.fromhex(path.name[:32]) for path in directory.rglob("*.kv")}


def fill(root):
    with open_store(root, quota_chunks=6, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("other", 1))


def sweep(base, monkeypatch, call, code_of, for_good):
    """Every N from the first to the last call, each with a new root: in an old one no directory is made any more."""
    nth = 0
    while True:
        nth += 1
        root = base / str(nth)
        root.mkdir()
        fill(root)
        with open_store(root, quota_chunks=6, **SETTINGS.get(call, {})) as store:
            store._upkeep._stopping.set()
            store._upkeep._thread.join()
            put_prefix(store, prefix("old", 3))
            put_bad(store)
            descriptors = open_descriptors()
            with monkeypatch.context() as patch:
                fault = Fault(patch, call, nth, code_of(nth), for_good)
                use_everything(store)
                if for_good:
                    use_everything(store)
            assert open_descriptors() <= descriptors, f"{call} number {nth} leaks a descriptor"
            assert disk_bytes(root) <= store.usage().quota_bytes
            check_recovered(store, root)
        shutil.rmtree(root)
        if not fault.fired:
            break
    assert nth > 1, f"{call} was never called"


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_call_is_misses_and_drops_until_it_works_again(fast_root, monkeypatch, call, for_good):
    """Every N from the first to the last call of each kind, with one error after the other: one failure costs a chunk
    at most; and a dying disk, a read-only remount or a lack of descriptors is over when it is over."""
    sweep(fast_root, monkeypatch, call, lambda nth: ERRORS[nth % len(ERRORS)], for_good)


@pytest.mark.long
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_call_of_every_kind_with_every_error(fast_root, monkeypatch, call, for_good, code):
    """The same, each N with each error."""
    sweep(fast_root, monkeypatch, call, lambda nth: code, for_good)


def test_a_failed_fsync_is_not_tried_again_on_the_same_file(fast_root, monkeypatch):
    """The kernel may have dropped the pages and report success the second time: drop the chunk, or write a new file."""
    synced, failures, files = [], {}, iter(range(1000))
    real_open, real_sync, of = osio.open, osio.fdatasync, {}

    def opened(path, flags, mode=0o600):
        fd = real_open(path, flags, mode)
        of[fd] = next(files)
        return fd

    def failing(fd):
        synced.append(of[fd])
        if len(synced) in failures:
            raise OSError(failures[len(synced)], "fsync")
        real_sync(fd)

    monkeypatch.setattr(osio, "open", opened)
    monkeypatch.setattr(osio, "fdatasync", failing)
    with open_store(fast_root, fsync="data") as store:
        put_prefix(store, prefix("old", 2))
        failures |= {3: errno.EIO, 5: errno.ENOSPC, 7: errno.ENOSPC, 8: errno.ENOSPC}
        new = prefix("new", 3)
        assert put(store, new[0]) is PutResult.IO_ERROR
        assert put(store, new[0]) is PutResult.STORED
        assert put(store, new[1]) is PutResult.STORED, "a full disk: evicted, and a new file written"
        assert put(store, new[2]) is PutResult.NO_SPACE
        assert len(synced) == len(set(synced)) == 8
        assert temporaries(fast_root) == [] and store.usage().used_bytes == disk_bytes(fast_root)


# Where everything is there and whole, an open makes none of these.
NOT_AT_OPEN = ("fdatasync", "fadvise_dontneed", "mkdir", "chmod", "rmdir", "rename")


def sweep_open(base, monkeypatch, call, code_of, for_good):
    """Every N from the first to the last call of an open, each on a root with a prefix."""
    keys = prefix("old", 6)
    descriptors = open_descriptors()
    nth = 0
    while True:
        nth += 1
        root, code = base / str(nth), code_of(nth)
        root.mkdir()
        with open_store(root) as store:
            put_prefix(store, keys)
        with monkeypatch.context() as patch:
            fault = Fault(patch, call, nth, code, for_good)
            try:
                with open_store(root, **SETTINGS.get(call, {})) as store:
                    if not for_good:
                        wait_until_counted(store)
                    fault.stop()
                    wait_until_counted(store)
                    store._writer.settle()
                    assert store.match(keys) in range(7)
                    assert store.usage().used_bytes == disk_bytes(root)
            except ConfigError as error:
                assert error.setting in ("nvme.path", "nvme.direct_io")
        assert open_descriptors() == descriptors, f"{call} number {nth} leaks a descriptor"
        with open_store(root) as store:
            # A start on a full disk gives up the oldest chunks for the few blocks that it needs.
            assert store.match(keys) == 6 or code == errno.ENOSPC
            assert all(holds(store, key) for key in keys[: store.match(keys)])
            assert temporaries(root) == []
        shutil.rmtree(root)
        if not fault.fired:
            break
    assert nth > 1 or call in NOT_AT_OPEN, f"{call} was never called"


@pytest.fixture(params=["small", "listed by threads", "from a snapshot"])
def size(request, monkeypatch):
    """A store of a few chunks, and the same treated as one of many thousands."""
    monkeypatch.setattr(upkeep, "UPKEEP_INTERVAL_S", 0.01)
    if request.param == "listed by threads":
        monkeypatch.setattr(recovery, "CHEAP_LISTING", 0)
    elif request.param == "from a snapshot":
        small_counts_as_large(monkeypatch.setattr)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_an_open_that_meets_a_failing_call_works_or_says_so(fast_root, monkeypatch, call, for_good):
    """`ConfigError` and nothing else; no descriptor and no session is left behind, and the next open works."""
    sweep_open(fast_root, monkeypatch, call, lambda nth: ERRORS[nth % len(ERRORS)], for_good)


@pytest.mark.long
@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("size", ["from a snapshot"], indirect=True)
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_an_open_that_meets_any_failing_call_with_any_error(fast_root, monkeypatch, call, for_good, code):
    """The same, each N with each error, where an open does most."""
    sweep_open(fast_root, monkeypatch, call, lambda nth: code, for_good)


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
