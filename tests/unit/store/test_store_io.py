"""How bytes move: direct, buffered, aligned or not, in full or in pieces; and the modes of what is created."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from store_helpers import (
    PAYLOAD,
    aligned,
    chunk_path,
    disk_bytes,
    holds,
    open_descriptors,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
    temporaries,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import Hit, PutResult, osio

KEY = prefix("io", 1)[0]
LARGE = (2 << 20) + 4096 * 3 + 5


def unaligned(data: bytes) -> memoryview:
    return aligned(b"x" * 8 + data)[8:]


def read_only(data: bytes) -> memoryview:
    return memoryview(data)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("memory", [aligned, unaligned, read_only])
@pytest.mark.parametrize("nbytes", [PAYLOAD, 8192, LARGE])
def test_any_memory_can_be_stored_and_loaded(root, direct_io, memory, nbytes):
    """LMCache's own pools give memory at any address; a payload may be read-only."""
    data = payload_of(KEY, nbytes)
    with open_store(root, quota_chunks=1000, direct_io=direct_io) as store:
        assert store.put(KEY, memory(data), depth=0, tokens=7) is PutResult.STORED
        for into in (aligned(bytes(nbytes)), unaligned(bytes(nbytes)), memoryview(bytearray(nbytes))):
            assert store.get(KEY, into) == Hit(nbytes, 7)
            assert into == data


def test_views_of_other_types_are_taken_as_their_bytes(root):
    """A tensor's buffer need not be a flat view of bytes; a view with gaps is the caller's mistake."""
    with open_store(root) as store:
        data = payload_of(KEY, 4096)
        assert store.put(KEY, memoryview(bytearray(data)).cast("I", (32, 32)), depth=0) is PutResult.STORED
        into = memoryview(bytearray(4096)).cast("I")
        assert store.get(KEY, into) == Hit(4096, 0)
        assert into.cast("B") == data
        with pytest.raises(TypeError):
            store.put(KEY, memoryview(bytearray(64))[::2], depth=0)
        with pytest.raises(ValueError, match="writable"):
            store.get(KEY, memoryview(bytes(4096)))


@pytest.mark.parametrize("arguments", [{"depth": -1}, {"depth": 2**32}, {"depth": 0, "tokens": -1}])
def test_arguments_that_no_file_could_hold_are_the_callers_mistake(root, arguments):
    """Raised before anything is written."""
    with open_store(root) as store:
        with pytest.raises(ValueError):
            store.put(KEY, aligned(b"x"), **arguments)
        with pytest.raises(ValueError):
            store.put(b"short", aligned(b"x"), depth=0)
        assert disk_bytes(root) == 0


def test_on_a_disk_chunks_pass_the_page_cache(root, monkeypatch):
    """Where the probe succeeds both directions use O_DIRECT, also for memory that is not aligned."""
    flags = []
    real = osio.open
    with open_store(root) as store:
        if not store._transfer.direct:
            pytest.skip("the temporary directory's file system refuses direct I/O")
        monkeypatch.setattr(osio, "open", lambda path, f, mode=0o600: flags.append(f) or real(path, f, mode))
        store.put(KEY, unaligned(payload_of(KEY)), depth=0, tokens=256)
        assert holds(store, KEY)
    assert len([f for f in flags if f & os.O_DIRECT]) == 2


@pytest.mark.parametrize("failing", ["open", "pwritev", "preadv"])
def test_a_file_system_that_refuses_direct_io_gets_buffered_io_and_a_warning(root, monkeypatch, failing):
    """Some accept the open and refuse the write; `on` then refuses to start and says why."""
    real = getattr(osio, failing)
    direct = set()

    def refuse(first, *arguments):
        if failing == "open":
            if arguments[0] & os.O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
        elif first in direct:
            raise OSError(errno.EINVAL, "refused")
        return real(first, *arguments)

    real_open = osio.open

    def remember(path, flags, mode=0o600):
        fd = real_open(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    if failing != "open":
        monkeypatch.setattr(osio, "open", remember)
    monkeypatch.setattr(osio, failing, refuse)
    descriptors = open_descriptors()
    with pytest.raises(ConfigError, match=r"nvme\.direct_io"):
        open_store(root, direct_io="on")
    assert open_descriptors() == descriptors
    with open_store(root, direct_io="auto") as store:
        assert any("nvme.direct_io" in warning and "buffered" in warning for warning in store.warnings)
        assert put(store, KEY) is PutResult.STORED and holds(store, KEY)
    assert temporaries(root) == []


def test_tmpfs_works_with_a_warning(ram_root):
    """It is RAM: allowed, and said."""
    with open_store(ram_root) as store:
        assert any("tmpfs" in warning and "RAM" in warning for warning in store.warnings)
        assert put_prefix(store, prefix("ram", 3)) == [PutResult.STORED] * 3
        assert holds(store, prefix("ram", 3)[2])
    with open_store(ram_root) as store:
        assert store.match(prefix("ram", 3)) == 3


@pytest.mark.parametrize("step", [1, 512, 4096])
def test_short_reads_and_writes_are_continued(root, monkeypatch, step):
    """The kernel may move fewer bytes than asked."""
    real_write, real_read = osio.pwritev, osio.preadv

    def some(buffers):
        return [buffers[0][:step]]

    with open_store(root, direct_io="off") as store:
        monkeypatch.setattr(osio, "pwritev", lambda fd, buffers, at: real_write(fd, some(buffers), at))
        monkeypatch.setattr(osio, "preadv", lambda fd, buffers, at: real_read(fd, some(buffers), at))
        assert put(store, KEY) is PutResult.STORED
        assert holds(store, KEY)


def test_a_write_that_makes_no_progress_is_a_drop(root, monkeypatch):
    """And no endless loop."""
    with open_store(root) as store:
        monkeypatch.setattr(osio, "pwritev", lambda *_: 0)
        assert put(store, KEY) is PutResult.IO_ERROR
        assert temporaries(root) == [] and store.usage().reserved_bytes == 0


@pytest.mark.parametrize("umask", [0, 0o777])
def test_directories_are_0700_and_files_0600_whatever_the_umask(root, umask):
    """KV encodes prompts."""
    before = os.umask(umask)
    try:
        with open_store(root) as store:
            put_prefix(store, prefix("modes", 3))
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    finally:
        os.umask(before)
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


@pytest.mark.parametrize("fsync", ["none", "data"])
def test_fdatasync_happens_once_a_chunk_before_it_is_published_where_it_is_set(root, monkeypatch, fsync):
    """And a failed one drops the chunk: what the disk holds then is unknown."""
    calls = []
    real = osio.fdatasync
    with open_store(root, fsync=fsync) as store:
        monkeypatch.setattr(osio, "fdatasync", lambda fd: calls.append(len(temporaries(root))) or real(fd))
        assert put(store, KEY) is PutResult.STORED
        assert calls == ([1] if fsync == "data" else [])

        def fail(fd):
            calls.append("failed")
            raise OSError(errno.EIO, "failed")

        monkeypatch.setattr(osio, "fdatasync", fail)
        key = prefix("second", 1)[0]
        assert put(store, key) is (PutResult.IO_ERROR if fsync == "data" else PutResult.STORED)
        assert calls.count("failed") == (1 if fsync == "data" else 0)
        assert temporaries(root) == []


def test_buffered_chunks_are_dropped_from_the_page_cache(root, monkeypatch):
    """After a read at once, after a write again once it can have reached the disk."""
    advised = []
    real = osio.fadvise_dontneed
    monkeypatch.setattr(
        osio, "fadvise_dontneed", lambda fd: advised.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or real(fd)
    )
    monkeypatch.setattr("lmcache_nvme_backend.store.writer.WRITE_BACK_S", 0.0)
    with open_store(root, direct_io="off") as store:
        put(store, KEY)
        path = str(chunk_path(store, KEY))
        store._writer.drop_written_pages()
        assert advised[-1] == path
        assert holds(store, KEY)
        assert advised[-2:] == [path, path]


def test_a_closed_store_finds_and_stores_nothing(root):
    """Closing twice is fine."""
    descriptors = open_descriptors()
    store = open_store(root)
    put(store, KEY)
    store.close()
    store.close()
    assert put(store, prefix("late", 1)[0]) is PutResult.CLOSED
    assert not holds(store, KEY) and store.match([KEY]) == 0
    assert not store.pin(KEY) and not store.remove(KEY) and store.clear() == 0
    assert store.usage().used_bytes == 0
    assert open_descriptors() == descriptors
    assert not list((root / "v1" / "sessions").iterdir())
    assert store.stats.puts[PutResult.CLOSED] == 1


def test_counters_tell_what_happened(root):
    """Every outcome once."""
    keys = prefix("counted", 3)
    with open_store(root, quota_chunks=2) as store:
        assert put_prefix(store, keys) == [PutResult.STORED, PutResult.STORED, PutResult.QUOTA]
        assert put(store, keys[0]) is PutResult.EXISTS
        assert holds(store, keys[0]) and not holds(store, keys[2])
        stats = store.stats
        assert (stats.stores, stats.hits, stats.drops[PutResult.QUOTA]) == (2, 1, 1)
        assert stats.bytes_written == 2 * PAYLOAD and stats.bytes_read == PAYLOAD
        assert sum(stats.misses.values()) == 1 and sum(stats.corrupt.values()) == 0
        put(store, prefix("evicts", 1)[0])
        assert stats.evictions == 1


@pytest.mark.parametrize("case", ["relative", "missing", "file", "quota", "blocked"])
def test_what_a_person_can_put_right_is_one_error(root, case):
    """It names the setting, what was found and what to do; and nothing is left behind."""
    path, setting, chunks = root, "nvme.path", 10.0
    if case == "relative":
        path = root.relative_to("/")
    elif case == "missing":
        path = root / "absent"
    elif case == "file":
        path = root / "file"
        path.touch()
    elif case == "blocked":
        (root / "v1").touch()
    else:
        setting, chunks = "nvme.quota_gib", 0
    descriptors = open_descriptors()
    with pytest.raises(ConfigError) as caught:
        open_store(path, quota_chunks=chunks)
    assert caught.value.setting == setting
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_root_that_cannot_be_written_is_one_error(root, monkeypatch, code):
    """Read-only mounts and missing rights, found at start."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(osio, "mkdir", fail)
    with pytest.raises(ConfigError, match=r"nvme\.path"):
        open_store(root)
