"""A disk smaller than the quota, really full: two small file systems of their own."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkStore, PutResult, StoreSettings
from lmcache_nvme_backend.store.breaker import ERRORS_TO_OPEN
from tests.unit.store.store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    chunk_path,
    disk_bytes,
    holds,
    open_descriptors,
    prefix,
    put,
    put_prefix,
    temporaries,
)

# What each takes: room for some hundred chunks of 12 KiB.
MIB = {"tmpfs": 2, "ext4": 6}
QUOTA = 64 << 20


def mount(kind, directory, image):
    if kind == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", f"size={MIB[kind]}m", "tmpfs", directory)
    else:
        with image.open("wb") as file:
            file.truncate(MIB[kind] << 20)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
        run("mount", "-o", "loop", image, directory)


def run(*command):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not let a test mount a small file system: {done.stderr.strip()[:200]}")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    mount(request.param, directory, tmp_path / "image")
    try:
        root = directory / "root"
        root.mkdir()
        yield root
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def open_on(root, namespace=NAMESPACE, **settings):
    return ChunkStore.open(root, namespace, StoreSettings(quota_bytes=QUOTA, **settings))


def free_bytes(root):
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def fill_up(path, leave=0):
    """Somebody else's file that takes what is left."""
    with path.open("wb", buffering=0) as file:
        block = bytes(4096)
        for _ in range(max(0, free_bytes(path.parent) - leave) // 4096 + 64 if not leave else 10**9):
            if leave and free_bytes(path.parent) <= leave:
                return
            try:
                file.write(block)
            except OSError:
                return


def consistent(store, root):
    assert temporaries(root) == [] and store.usage().reserved_bytes == 0
    assert store.usage().used_bytes == disk_bytes(root)
    assert not store.stands_aside


def test_a_disk_smaller_than_the_quota_evicts_and_goes_on_storing(small_disk):
    """The newest chunks are there, the oldest gave their room, and nothing is dropped."""
    number = 3 * free_bytes(small_disk) // CHUNK_FILE
    with open_on(small_disk) as store:
        keys = [prefix(f"p{turn}", 1)[0] for turn in range(number)]
        assert [put(store, key) for key in keys] == [PutResult.STORED] * number
        assert store.stats.evictions > number // 3
        assert not store.contains(keys[0]) and all(holds(store, key) for key in keys[-20:])
        consistent(store, small_disk)
    with open_on(small_disk) as store:
        assert all(holds(store, key) for key in keys[-20:])
        consistent(store, small_disk)


def test_what_is_pinned_stays_and_a_store_without_room_is_dropped(small_disk):
    """Once evicted and tried again, then dropped: no error, no loop, no step aside; and all works when room returns."""
    others = small_disk.parent / "others"
    with open_on(small_disk) as store:
        pinned = prefix("pinned", 8)
        put_prefix(store, pinned)
        assert store.match(pinned, pin=True) == 8
        fill_up(others)
        descriptors = open_descriptors()
        results = {put(store, key) for key in prefix("new", 3 * ERRORS_TO_OPEN)}
        assert results == {PutResult.NO_SPACE}
        assert open_descriptors() <= descriptors
        assert store.match(pinned) == 8 and all(holds(store, key) for key in pinned)
        consistent(store, small_disk)
        for key in pinned:
            store.unpin(key)
        assert put(store, prefix("room", 1)[0]) is PutResult.STORED, "a pinned chunk was in the way"
        others.unlink()
        before = store.stats.evictions
        assert put_prefix(store, prefix("again", 10)) == [PutResult.STORED] * 10
        assert store.stats.evictions == before
        consistent(store, small_disk)


@pytest.mark.parametrize("fsync", ["none", "data"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_disk_that_others_fill_while_stores_go_on_is_drops_at_most(small_disk, direct_io, fsync):
    """The room that is left shrinks block by block under the stores, and comes back."""
    others = small_disk.parent / "others"
    with open_on(small_disk, direct_io=direct_io, fsync=fsync) as store:
        put_prefix(store, prefix("old", 30))
        room = free_bytes(small_disk)
        for turn in range(20):
            fill_up(others, leave=room * (19 - turn) // 20 + 1)
            for key in prefix(f"turn{turn}", 4):
                assert put(store, key) in (PutResult.STORED, PutResult.NO_SPACE)
            consistent(store, small_disk)
        for key in store._index.all_keys():
            assert holds(store, key), "a chunk was published that did not fit"
        others.unlink()
        assert put_prefix(store, prefix("again", 10)) == [PutResult.STORED] * 10
        consistent(store, small_disk)


@pytest.mark.parametrize("direct_io", ["auto", "on"])
def test_a_start_on_a_full_disk_gives_up_a_chunk_or_two_and_serves_the_rest(small_disk, direct_io):
    """An engine must come up again beside a full disk; and a full disk is no reason for buffered I/O."""
    others = small_disk.parent / "others"
    keys = prefix("kept", 16)
    with open_on(small_disk) as store:
        put_prefix(store, keys)
    fill_up(others)
    with open_on(small_disk, direct_io=direct_io) as store:
        assert store.direct_io and not [text for text in store.warnings if "direct_io" in text]
        assert store.match(keys) >= 8 and all(holds(store, key) for key in keys[: store.match(keys)])
        assert {put(store, key) for key in prefix("new", 5)} == {PutResult.STORED}, "the old ones give way"
        others.unlink()
        assert put_prefix(store, prefix("again", 10)) == [PutResult.STORED] * 10
        consistent(store, small_disk)


def test_a_start_on_a_disk_that_others_have_filled_says_so(small_disk):
    """Nothing is there that could give way; nothing is left behind, and with room it starts."""
    fill_up(small_disk.parent / "others")
    descriptors = open_descriptors()
    with pytest.raises(ConfigError, match="No space left") as caught:
        open_on(small_disk)
    assert caught.value.setting == "nvme.path" and open_descriptors() == descriptors
    (small_disk.parent / "others").unlink()
    with open_on(small_disk) as store:
        assert put_prefix(store, prefix("new", 3)) == [PutResult.STORED] * 3
        consistent(store, small_disk)


def test_two_namespaces_on_a_full_disk_take_the_dead_ones_chunks_first(small_disk):
    """A model that nobody runs makes room for the one that runs."""
    with open_on(small_disk, OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("dead", 40))
        assert chunk_path(other, prefix("dead", 40)[0]).exists()
    with open_on(small_disk) as store:
        keys = [prefix(f"p{turn}", 1)[0] for turn in range(free_bytes(small_disk) // CHUNK_FILE + 20)]
        assert {put(store, key) for key in keys} == {PutResult.STORED}
        assert all(holds(store, key) for key in keys[-60:])
        assert len(list((small_disk / "v1" / OTHER_NAMESPACE.digest).rglob("*.kv"))) < 40
        consistent(store, small_disk)
