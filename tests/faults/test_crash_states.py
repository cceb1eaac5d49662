"""What a crash, a bad disk or a person can leave behind, enumerated: a miss, never wrong bytes, never an exception."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import Hit, PutResult
from lmcache_nvme_backend.store.format import BLOCK, chunk_name
from tests.faults.support.fence import Fence, snapshot
from tests.unit.store.store_helpers import (
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
    temporaries,
)

KEYS = prefix("crashed", 4)
HEADS = [prefix(f"crashed {number}", 1)[0] for number in range(4)]
LARGE = prefix("large", 1)[0]
LARGE_PAYLOAD = 15 * BLOCK + 100
LARGE_FILE = 17 * BLOCK


def large_chunk(store):
    assert store.put(LARGE, aligned(payload_of(LARGE, LARGE_PAYLOAD)), depth=0).kept
    return chunk_path(store, LARGE)


def large_hit(store):
    """Whether the large chunk loads; fails where it has wrong bytes."""
    into = aligned(bytes(LARGE_PAYLOAD))
    result = store.get(LARGE, into)
    if isinstance(result, Hit):
        assert result.nbytes == LARGE_PAYLOAD and into == payload_of(LARGE, LARGE_PAYLOAD)
        return True
    assert result.cause.corrupt, result
    return False


def no_longer_there(store, root):
    """The bad file has gone, its room is free, and the chunk can be stored again."""
    assert not store.contains(LARGE)
    assert store.usage().used_bytes == disk_bytes(root) == 0
    large_chunk(store)
    assert large_hit(store)
    store.remove(LARGE)


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_every_truncation_is_a_miss(fast_root, restarted, codec):
    """At each 4 KiB and one byte beside it, found at open or while open, and the same for a file that grew."""
    store = open_store(fast_root, codec=codec)
    sizes = [size + beside for size in range(0, LARGE_FILE + BLOCK, BLOCK) for beside in (-1, 0, 1)]
    for size in sizes:
        if size < 0 or size == LARGE_FILE:
            continue
        path = large_chunk(store)
        if restarted:
            store.close()
        os.truncate(path, size)
        if restarted:
            store = open_store(fast_root, codec=codec)
        assert not large_hit(store), size
        if not restarted:  # the account goes by what was stored there
            assert not store.contains(LARGE)
    no_longer_there(store, fast_root)
    store.close()


@pytest.mark.parametrize("damage", ["zeroed from here", "this block zeroed", "another chunk's block"])
def test_blocks_that_never_reached_the_disk_are_a_miss(fast_root, damage):
    """For each block: the tail, the block alone, or what lay there before."""
    with open_store(fast_root) as store:
        stale = os.urandom(BLOCK)
        for number in range(17):
            path = large_chunk(store)
            data = bytearray(path.read_bytes())
            end = len(data) if damage == "zeroed from here" else (number + 1) * BLOCK
            data[number * BLOCK : end] = stale if damage.startswith("another") else bytes(end - number * BLOCK)
            path.write_bytes(data)
            assert not large_hit(store), number
        no_longer_there(store, fast_root)


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("keys", [KEYS, HEADS], ids=["of one prefix", "of one depth"])
def test_every_pair_of_swapped_files_is_two_misses(fast_root, restarted, keys):
    """Files that a repair of the file system has given each other's names; of one depth and size nothing but the key
    tells them apart."""
    for one, two in itertools.combinations(range(4), 2):
        store = open_store(fast_root)
        if keys is KEYS:
            put_prefix(store, keys)
        else:
            assert all(put(store, key).kept for key in keys if not store.contains(key))
        a, b = chunk_path(store, keys[one]), chunk_path(store, keys[two])
        if restarted:
            store.close()
        a.rename(fast_root / "aside")
        b.rename(a)
        (fast_root / "aside").rename(b)
        if restarted:
            store = open_store(fast_root)
        with store:
            assert [holds(store, key) for key in keys] == [number not in (one, two) for number in range(4)]
            assert not a.exists() and not b.exists()
            assert store.usage().used_bytes == disk_bytes(fast_root)


@pytest.mark.parametrize("link", [False, True], ids=["copied", "hard-linked"])
def test_a_whole_namespace_under_another_ones_name_is_all_misses(fast_root, link):
    """A directory copied or renamed by hand: another model's KV is never served."""
    with open_store(fast_root) as store:
        put_prefix(store, KEYS)
    base = fast_root / "v1"
    shutil.copytree(
        base / NAMESPACE.digest, base / OTHER_NAMESPACE.digest, copy_function=os.link if link else shutil.copy2
    )
    with open_store(fast_root, namespace=OTHER_NAMESPACE) as other:
        assert other.match(KEYS) == 4, "the names alone look good"
        assert [holds(other, key) for key in KEYS] == [False] * 4
        assert other.match(KEYS) == 0
    with open_store(fast_root) as store:
        assert all(holds(store, key) for key in KEYS)
        assert store.usage().used_bytes == disk_bytes(fast_root)


def test_stray_temporaries_of_every_kind_are_swept_or_left_and_nothing_stops(fast_root, tmp_path, monkeypatch):
    """Of dead sessions, of none, links, directories, FIFOs: a link goes and its target stays."""
    (tmp_path / "outside").write_bytes(b"precious")
    with open_store(fast_root):
        pass
    temp = fast_root / "v1" / "temp"
    (temp / "0123456789abcdef-7").write_bytes(bytes(3 * BLOCK))
    (temp / "stray").write_bytes(b"")
    (temp / ("n" * 255)).touch()
    (temp / os.fsdecode(b"\xff\xfe")).touch()
    (temp / "link").symlink_to(tmp_path / "outside")
    (temp / "dangling").symlink_to("nowhere")
    (temp / "loop").symlink_to("loop")
    os.mkfifo(temp / "fifo")
    (temp / "directory").mkdir()
    (temp / "full").mkdir()
    (temp / "full" / "file").write_bytes(b"x")
    fence = Fence(monkeypatch, fast_root)
    with open_store(fast_root) as store:
        assert {path.name for path in temporaries(fast_root)} <= {"directory", "full"}
        assert put_prefix(store, KEYS) == [PutResult.STORED] * 4 and all(holds(store, key) for key in KEYS)
    assert fence.escapes == []
    assert (tmp_path / "outside").read_bytes() == b"precious"


PLACES = ("chunk", "shard", "namespace", "namespace.json", "account", "session", "temp", "sessions", "v1")
KINDS = ("file", "empty directory", "full directory", "symlink", "dangling symlink", "looping symlink", "fifo")


def put_in_place(kind, path, outside):
    """Whatever was at `path` is now something else; a link leads to a copy of it outside the root."""
    copy = outside / path.name
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True)
        shutil.rmtree(path)
    elif path.exists():
        shutil.copy2(path, copy)
        path.unlink()
    else:
        copy.write_bytes(b"precious")
    match kind:
        case "file":
            path.write_bytes(b"hello")
        case "empty directory":
            path.mkdir()
        case "full directory":
            (path / "x").mkdir(parents=True)
        case "symlink":
            path.symlink_to(copy)
        case "dangling symlink":
            path.symlink_to(outside / "nowhere")
        case "looping symlink":
            path.symlink_to(path.name)
        case "fifo":
            os.mkfifo(path)


def use_everything(store):
    store.match(KEYS, pin=True)
    for key in KEYS:
        holds(store, key)
        store.unpin(key)
    for name in "abc":  # until chunks have to go
        put_prefix(store, prefix(name, 4))
        for key in prefix(name, 4):
            holds(store, key)
    store._upkeep._flush(100)
    store._upkeep._mark_use()
    store._upkeep._restore()
    store._upkeep._trim()


@pytest.mark.parametrize("while_open", [False, True], ids=["found at open", "while open"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_anything_in_the_place_of_anything_is_a_miss_and_nothing_outside_is_touched(
    fast_root, tmp_path, monkeypatch, place, kind, while_open
):
    """Loads, stores, evictions and removals go on, or the start says what is in its way; what a link leads to is
    neither read nor written nor removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    base = fast_root / "v1"
    store = open_store(fast_root, quota_chunks=8)
    put_prefix(store, KEYS)
    path = {
        "chunk": chunk_path(store, KEYS[2]),
        "shard": chunk_path(store, KEYS[2]).parent,
        "namespace": base / NAMESPACE.digest,
        "namespace.json": base / NAMESPACE.digest / "namespace.json",
        "session": base / "sessions" / store._session.id,
        "v1": base,
    }.get(place, base / place)
    if not while_open:
        store.close()
    put_in_place(kind, path, outside)
    before = snapshot(outside)
    fence = Fence(monkeypatch, fast_root)
    if not while_open:
        try:
            store = open_store(fast_root, quota_chunks=8)
        except ConfigError as error:
            assert error.setting == "nvme.path" and place in ("account", "sessions", "temp", "v1")
            assert fence.escapes == [] and snapshot(outside) == before
            return
    with store:
        use_everything(store)
        put(store, KEYS[2], 2)
        if place in ("chunk", "shard", "namespace", "namespace.json", "temp") and kind != "full directory":
            assert holds(store, KEYS[2]), "stored again"
        store.clear()
    if place == "v1":  # a whole store elsewhere may be looked at, for it cannot be told apart at each call
        fence.escapes = [call for call in fence.escapes if not call.startswith(("open", "listdir"))]
    assert fence.escapes == []
    assert snapshot(outside) == before


def test_a_dead_namespace_that_is_a_link_is_not_evicted_through_it(fast_root, tmp_path, monkeypatch):
    """Somebody moved a model's chunks to another disk: those are not this root's to remove."""
    with open_store(fast_root, namespace=OTHER_NAMESPACE, quota_chunks=8) as other:
        put_prefix(other, KEYS)
    moved = fast_root / "v1" / OTHER_NAMESPACE.digest
    shutil.move(moved, tmp_path / "moved")
    moved.symlink_to(tmp_path / "moved")
    before = snapshot(tmp_path / "moved")
    fence = Fence(monkeypatch, fast_root)
    with open_store(fast_root, quota_chunks=4) as store:
        assert store.usage().used_bytes == 0
        put_prefix(store, prefix("new", 8))
        assert store.stats.evictions > 0
    assert fence.escapes == [] and snapshot(tmp_path / "moved") == before


def test_a_chunk_with_a_second_link_outside_keeps_its_other_name(root, tmp_path):
    """Removal takes the store's name and nothing else."""
    with open_store(root) as store:
        put_prefix(store, KEYS)
        os.link(chunk_path(store, KEYS[0]), tmp_path / "kept")
        assert store.clear() == 4
    assert (tmp_path / "kept").stat().st_size > 0


def test_a_name_that_promises_too_much_is_a_miss(fast_root):
    """The largest depth and size that a name can say; nothing is allocated for it."""
    with open_store(fast_root) as store:
        put(store, KEYS[0])
        path = chunk_path(store, KEYS[0])
    path.rename(path.with_name(chunk_name(KEYS[0], 2**32 - 1, 2**32 - 1)))
    with open_store(fast_root) as store:
        assert not holds(store, KEYS[0])
        put_prefix(store, KEYS)
        assert not holds(store, KEYS[0]) or store.match(KEYS) == 4
