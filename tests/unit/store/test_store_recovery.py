"""Opening on whatever lies there: no exception, no wrong bytes, and good chunks are found."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
    temporaries,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import Miss, MissCause, PutResult, osio, recovery
from lmcache_nvme_backend.store.format import chunk_name

KEYS = prefix("recovered", 5)


def garbage(kind, path, target):
    """Put something that is not a chunk at a chunk's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.unlink()
    match kind:
        case "empty":
            path.touch()
        case "directory":
            path.mkdir()
        case "full directory":
            (path / "x").mkdir(parents=True)
        case "symlink":
            path.symlink_to(target)
        case "dangling symlink":
            path.symlink_to("nowhere")
        case "fifo":
            os.mkfifo(path)
        case "noise":
            path.write_bytes(payload_of(KEYS[0], CHUNK_FILE))
        case "text":
            path.write_text("hello")


GARBAGE = ["empty", "directory", "full directory", "symlink", "dangling symlink", "fifo", "noise", "text"]


def test_everything_stored_is_found_after_a_restart(root):
    """With the right bytes, and the account agrees."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
    with open_store(root) as store:
        assert store.match(KEYS) == 5
        assert all(holds(store, key) for key in KEYS)
        assert store.usage().used_bytes == disk_bytes(root) == 5 * CHUNK_FILE


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("while_open", [True, False])
def test_garbage_in_a_chunks_place_is_a_miss_and_the_next_store_works(root, tmp_path, kind, while_open):
    """A symlink is not followed, even to a good chunk; and the key can be stored again."""
    store = open_store(root)
    put_prefix(store, KEYS)
    path = chunk_path(store, KEYS[2])
    good = tmp_path / "good"
    good.write_bytes(path.read_bytes())
    if not while_open:
        store.close()
    garbage(kind, path, good)
    if not while_open:
        store = open_store(root)
    with store:
        assert not holds(store, KEYS[2])
        assert store.match(KEYS) == 2
        result = put(store, KEYS[2], 2, KEYS[1])
        if kind == "full directory":  # somebody's files: left alone
            assert result is PutResult.IO_ERROR and path.is_dir()
        else:
            assert result is PutResult.STORED and holds(store, KEYS[2])
            assert store.match(KEYS) == 5
        assert temporaries(root) == [] and store.usage().reserved_bytes == 0
    assert good.exists()


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_where_a_key_is_to_be_stored_makes_room_or_drops(root, tmp_path, kind):
    """It appeared after the index was read."""
    (tmp_path / "good").write_bytes(b"x")
    with open_store(root) as store:
        path = root / "v1" / NAMESPACE.digest / KEYS[0].hex()[:2] / chunk_name(KEYS[0], 0, CHUNK_FILE // 4096)
        garbage(kind, path, tmp_path / "good")
        result = put(store, KEYS[0])
        if kind == "full directory":
            assert result is PutResult.IO_ERROR
        elif kind == "noise":  # the right size: taken for another process's chunk, found out when it is read
            assert result is PutResult.EXISTS and not holds(store, KEYS[0])
            assert put(store, KEYS[0]) is PutResult.STORED
        else:
            assert result is PutResult.STORED and holds(store, KEYS[0])


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_anywhere_in_a_namespace_is_no_error(root, kind):
    """Stray names, in every place where a name can be."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        directory = root / "v1" / NAMESPACE.digest
    free = next(f"{n:02x}" for n in range(256) if not (directory / f"{n:02x}").exists())
    for place in (
        directory / "stray",
        directory / free,
        chunk_path(store, KEYS[0]).with_name("stray"),
        chunk_path(store, KEYS[0]).with_name("é" * 60),
        chunk_path(store, KEYS[0]).with_name("0" * 250),
        root / "v1" / "stray",
        root / "v1" / ("0" * 32),
        root / "v1" / "sessions" / "stray",
        root / "v1" / "sessions" / ("0" * 16),
        root / "stray",
    ):
        garbage(kind, place, root / "v1")
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        with open_store(root, namespace=namespace) as store:
            assert put(store, prefix("new", 1)[0]).kept
    with open_store(root) as store:
        assert all(holds(store, key) for key in KEYS)
        odd = next(key for key in (prefix("odd", 9999)) if key.hex()[:2] == free)
        assert put(store, odd) is PutResult.STORED


def test_names_that_are_not_utf8_are_no_error(root):
    """A listing can hold any bytes."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        shard = chunk_path(store, KEYS[0]).parent
    (shard / os.fsdecode(b"\xff\xfe-stray")).write_bytes(b"abc")
    with open_store(root) as store:
        assert store.match(KEYS) == 5
        assert store.usage().used_bytes == 5 * CHUNK_FILE + 3


def test_two_names_of_one_key_become_one(root):
    """A copy by hand under another depth: one is kept, the other's room is free."""
    with open_store(root) as store:
        put(store, KEYS[0])
        path = chunk_path(store, KEYS[0])
    path.with_name(chunk_name(KEYS[0], 7, CHUNK_FILE // 4096)).write_bytes(path.read_bytes())
    with open_store(root) as store:
        assert store.usage().used_bytes == disk_bytes(root) == CHUNK_FILE
        buffer = memoryview(bytearray(CHUNK_FILE))
        result = store.get(KEYS[0], buffer)
        assert not isinstance(result, Miss) or result.cause is MissCause.NAME


def test_a_namespace_file_in_place_of_its_directory_is_replaced(root):
    """Even that."""
    (root / "v1").mkdir()
    (root / "v1" / NAMESPACE.digest).write_text("not a directory")
    with open_store(root) as store:
        assert put_prefix(store, KEYS) == [PutResult.STORED] * 5


def test_a_chunk_under_a_wrong_shard_is_not_found(root):
    """A lookup would not find it there either."""
    with open_store(root) as store:
        put(store, KEYS[0])
        path = chunk_path(store, KEYS[0])
    wrong = path.parents[1] / ("00" if path.parent.name != "00" else "01")
    wrong.mkdir()
    path.rename(wrong / path.name)
    with open_store(root) as store:
        assert store.match(KEYS) == 0
        assert store.usage().used_bytes == CHUNK_FILE


@pytest.mark.parametrize("again", ["counted", "opened"])
def test_what_could_not_be_looked_at_is_not_taken_for_nothing(root, monkeypatch, again):
    """A count that fails half-way is no count: the account stays in doubt until one succeeds."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        stray = f"{store.directory}/stray"
    (root / "v1" / "stray").mkdir()
    for path in (Path(stray), root / "v1" / "stray" / "file"):
        path.write_bytes(bytes(5000))
    real = osio.lstat

    def failing(path):
        if path == stray:
            raise OSError(errno.EIO, "unreadable")
        return real(path)

    if again == "opened":
        with monkeypatch.context() as patch:
            patch.setattr(osio, "lstat", failing)
            with pytest.raises(ConfigError, match="unreadable"):
                open_store(root)
    with open_store(root) as store:
        if again == "counted":
            with monkeypatch.context() as patch:
                patch.setattr(osio, "lstat", failing)
                with pytest.raises(OSError, match="unreadable"), store._account.locked(5, force_recount=True):
                    pass
            with store._account.locked(5):
                pass
        assert store.usage().used_bytes == disk_bytes(root) == 5 * CHUNK_FILE + 10_000


def listers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-list")]


def test_a_large_namespace_is_listed_by_several_at_once(root, monkeypatch):
    """With the same result, whoever stops half-way, and an error where one of its directories cannot be listed."""
    keys = prefix("many", 60)
    with open_store(root) as store:
        put_prefix(store, keys)
        directory = store._directory
    one_by_one = sorted(recovery.NamespaceScan(directory))
    assert sorted(key for key, _, _ in one_by_one) == sorted(keys)
    monkeypatch.setattr(recovery, "CHEAP_LISTING", 0)
    seen = set()
    real = osio.listdir

    def noting(path):
        seen.add(threading.current_thread().name)
        return real(path)

    monkeypatch.setattr(osio, "listdir", noting)
    assert sorted(recovery.NamespaceScan(directory)) == one_by_one
    assert any(name.startswith("kvtier-list") for name in seen)
    half = iter(recovery.NamespaceScan(directory))
    next(half)
    del half
    assert not listers()

    def failing(path):
        if path.endswith(f"/{keys[30][:1].hex()}"):
            raise OSError(errno.EIO, "unreadable")
        return real(path)

    monkeypatch.setattr(osio, "listdir", failing)
    with pytest.raises(OSError, match="unreadable"):
        list(recovery.NamespaceScan(directory))
    assert not listers()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_large_namespace_is_listed_with_the_threads_that_can_be_had(root, monkeypatch, threads):
    """A process at its limit of threads, or at its end, opens, counts and stores all the same."""
    keys = prefix("many", 60)
    with open_store(root) as store:
        put_prefix(store, keys)
    monkeypatch.setattr(recovery, "CHEAP_LISTING", 0)
    real, started = threading.Thread.start, []

    def start(thread):
        if thread.name == "kvtier-list":
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with open_store(root) as store:
            assert len(started) == threads
            assert store.match(keys) == 60 and store.usage().used_bytes == disk_bytes(root)
            started.clear()
            with store._account.locked(5, force_recount=True):
                pass
            assert put(store, prefix("more", 1)[0]) is PutResult.STORED
            assert store.usage().used_bytes == disk_bytes(root)
    assert not listers()


def test_the_interpreter_ends_while_a_directory_hangs(root, start_child):
    """What lists directories in the background is not waited for at the exit."""
    program = """
import threading
from lmcache_nvme_backend.store import osio, recovery
with open_store(root) as store:
    put_prefix(store, prefix("many", 60))
    directory = store.directory
recovery.CHEAP_LISTING = 0
real, hanging = osio.listdir, threading.Event()
def listdir(path):
    if threading.current_thread().name == "kvtier-list":
        hanging.set()
        time.sleep(600)
    return real(path)
osio.listdir = listdir
threading.Thread(target=lambda: list(recovery.NamespaceScan(directory)), daemon=True).start()
hanging.wait()
say("hangs")
"""
    child = start_child(program, root)
    assert child.stdout.readline() == "hangs\n"
    assert child.wait(timeout=30) == 0
