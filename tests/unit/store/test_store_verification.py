"""Reading everything: each kind of damage is found, nothing good is touched, the page cache does not grow."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
    session_files,
)

from lmcache_nvme_backend.store import PutResult, StoreSettings, osio, verification
from lmcache_nvme_backend.store.format import CODEC_ZSTD, Header, checksum
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.store import ChunkStore
from lmcache_nvme_backend.store.verification import Verification, size, verify


def check(root: Path, remove_bad: bool = False) -> Verification:
    return verify(StoreTree(str(root)), remove_bad)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def damage(root: Path, keys: list[bytes]) -> dict[str, str]:
    """Damage of each kind, one a chunk: file name -> the cause that is to be found."""
    with open_store(root) as store, open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(store, keys)
        paths = [chunk_path(store, key) for key in keys]
        put(other, keys[6])
        foreign = chunk_path(other, keys[6])
    flip(paths[0], 4096 + 17)
    flip(paths[1], 20)
    os.truncate(paths[2], 4096)
    renamed = paths[3].with_name(paths[3].name.replace("-00000003-", "-00000009-"))
    paths[3].rename(renamed)
    first, second = paths[4].read_bytes(), paths[5].read_bytes()
    paths[4].write_bytes(second)
    paths[5].write_bytes(first)
    paths[6].unlink()
    paths[6].write_bytes(foreign.read_bytes())
    paths[7].unlink()
    paths[7].symlink_to("/etc/passwd")
    return {
        paths[0].name: "payload checksum",
        paths[1].name: "header checksum",
        paths[2].name: "truncated",
        renamed.name: "name",
        paths[4].name: "key",
        paths[5].name: "key",
        paths[6].name: "namespace",
        paths[7].name: "truncated",
    }


def test_every_kind_of_damage_is_found_and_the_good_is_counted(root):
    """Header, checksum of the payload, size, name against content, a chunk of another namespace, a link."""
    keys = prefix("damaged", 10)
    expected = damage(root, keys)
    before = disk_bytes(root)
    seen = []
    found = verify(StoreTree(str(root)), False, seen.append)
    good = 2 + 1  # two of the ten, and the other namespace's
    assert {Path(fault.path).name: fault.cause for fault in found.bad} == expected
    assert not found.sound and not any(fault.removed for fault in found.bad)
    assert (found.chunks, found.nbytes, found.gone) == (good, good * CHUNK_FILE, 0)
    assert (len(seen), sum(seen)) == size(StoreTree(str(root)))
    assert disk_bytes(root) == before


def test_remove_bad_removes_what_is_bad_and_keeps_the_account_right(root):
    """With an engine open: its chunks that are good stay, the account is the disk's, nothing of the tool is left."""
    keys = prefix("damaged", 10)
    expected = damage(root, keys)
    with open_store(root) as store:
        found = check(root, remove_bad=True)
        assert {Path(fault.path).name for fault in found.bad if fault.removed} == set(expected)
        assert store.usage().used_bytes == disk_bytes(root)
        assert all(holds(store, key) == (key in keys[8:]) for key in keys)
        assert len(session_files(root)) == 1 and Path("/etc/passwd").exists()
        assert put(store, keys[0]) is PutResult.STORED
    assert check(root).sound


def test_compressed_chunks_larger_in_memory_than_on_disk_are_checked(root):
    """Their size in memory is the header's; a flipped bit is found all the same."""
    settings = StoreSettings(quota_bytes=1 << 30, codec="zstd")
    keys = prefix("compressed", 2)
    with ChunkStore.open(root, NAMESPACE, settings) as store:
        for key in keys:
            assert store.put(key, memoryview(bytes(5 << 20)), depth=0) is PutResult.STORED
        path = chunk_path(store, keys[0])
    assert path.stat().st_size < 1 << 20
    assert check(root).chunks == 2
    flip(path, 4096 + 3)
    assert [fault.cause for fault in check(root).bad] == ["payload checksum"]


def test_a_name_that_claims_petabytes_is_not_believed(root):
    """No memory is taken for what the file is not, nor for a sparse file that is of that size."""
    key = prefix("huge", 1)[0]
    with open_store(root) as store:
        put(store, key)
        path = chunk_path(store, key)
    claims = path.with_name(path.name.replace("-00000003.kv", "-ffffffff.kv"))
    path.rename(claims)
    assert [fault.cause for fault in check(root).bad] == ["truncated"]
    sparse = claims.with_name(claims.name.replace("-ffffffff.kv", "-00100000.kv"))
    claims.rename(sparse)
    os.truncate(sparse, 0x100000 * 4096)
    assert [fault.cause for fault in check(root).bad] == ["length"]


def test_a_header_that_claims_terabytes_in_memory_is_reported_unread(root):
    """Whole in itself, but no chunk that could be checked here: it is not good, and it is not removed."""
    key = prefix("bomb", 1)[0]
    with open_store(root) as store:
        put(store, key)
        path = chunk_path(store, key)
    header = Header(key, NAMESPACE.raw_digest, 0, 256, CODEC_ZSTD, PAYLOAD, 1 << 42, checksum(payload_of(key)))
    data = bytearray(path.read_bytes())
    header.pack_into(memoryview(data)[:4096])
    path.write_bytes(data)
    found = check(root, remove_bad=True)
    assert found.bad == [] and [fault.path for fault in found.unreadable] == [str(path)]
    assert not found.sound and path.exists()


def test_a_description_of_another_namespace_is_bad_and_goes(root):
    """Two runs that differ must not look alike to a person; the next open writes it again."""
    with open_store(root), open_store(root, namespace=OTHER_NAMESPACE):
        pass
    mine, others = (root / "v1" / each.digest / "namespace.json" for each in (NAMESPACE, OTHER_NAMESPACE))
    mine.write_text(others.read_text().replace(OTHER_NAMESPACE.digest, NAMESPACE.digest))
    assert [fault.path for fault in check(root).bad] == [str(mine)]
    assert check(root, remove_bad=True).bad[0].removed and not mine.exists()
    assert check(root).sound


def test_strays_are_named_and_stay(root):
    """What is no chunk is not the store's to remove; it does not make a store bad."""
    with open_store(root) as store:
        key = prefix("beside", 1)[0]
        put(store, key)
        stray = chunk_path(store, key).with_name("notes.txt")
    stray.write_text("mine")
    found = check(root, remove_bad=True)
    assert found.sound and found.strays == [str(stray)] and stray.exists()


def test_a_disk_that_fails_is_unreadable_and_not_bad(root, monkeypatch):
    """An I/O error says nothing about the file, so --remove-bad leaves it."""
    with open_store(root) as store:
        put_prefix(store, prefix("failing", 2))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(osio, "preadv", fail)
    found = check(root, remove_bad=True)
    assert [fault.cause for fault in found.unreadable] == ["unreadable"] * 2 and found.bad == []
    assert disk_bytes(root) == 2 * CHUNK_FILE


@pytest.mark.parametrize("direct", [True, False])
def test_reading_everything_leaves_nothing_in_the_page_cache(root, monkeypatch, direct):
    """With direct I/O, and without it by dropping what was read."""
    with open_store(root) as store:
        for key in prefix("cold", 8):
            store.put(key, memoryview(os.urandom(1 << 20)), depth=0)
        if direct and not store.direct_io:
            pytest.skip("this file system takes no direct I/O")
    files = sorted((root / "v1" / NAMESPACE.digest).glob("*/*.kv"))
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not direct:
        monkeypatch.setattr(verification._Verifier, "_reads_directly", lambda *_: False)
    found = check(root)
    assert found.direct_io is direct and found.chunks == len(files) > 0
    assert sum(cached_pages(file) for file in files) == 0


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags) == 0
        del view
        return sum(flag & 1 for flag in flags)
