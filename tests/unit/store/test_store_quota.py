"""The quota is a host's: everything under the root counts, and the account always agrees with the disk."""

from __future__ import annotations

import shutil
import struct

import pytest
from store_helpers import (
    CHUNK_FILE,
    OTHER_NAMESPACE,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    prefix,
    put,
    put_prefix,
    session_files,
    temporaries,
)

from lmcache_nvme_backend.store import PutResult


def test_files_found_at_start_count(root):
    """Own chunks, another namespace's chunks, and files that are not the store's at all."""
    with open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("other", 2))
    with open_store(root) as store:
        put_prefix(store, prefix("own", 3))
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "file").write_bytes(bytes(7000))
    (root / "v1" / "stray").write_bytes(bytes(50))
    (root / "v1" / OTHER_NAMESPACE.digest / "00").mkdir(exist_ok=True)
    (root / "v1" / OTHER_NAMESPACE.digest / "00" / "stray").write_bytes(bytes(3))
    with open_store(root) as store:
        assert store.usage().used_bytes == 5 * CHUNK_FILE + 7053 == disk_bytes(root)


def test_other_peoples_files_that_eat_the_quota_are_a_warning(root):
    """A cache in a directory full of models would store nothing and not say why."""
    (root / "model.safetensors").write_bytes(bytes(6 * CHUNK_FILE))
    with open_store(root, quota_chunks=10) as store:
        assert any("other files" in warning and "nvme.quota_gib" in warning for warning in store.warnings)
        assert put_prefix(store, prefix("own", 5))[3:] == [PutResult.STORED, PutResult.QUOTA]
        assert (root / "model.safetensors").stat().st_size == 6 * CHUNK_FILE


def test_a_lowered_quota_is_met_at_open(root):
    """The least recently used chunks go at once."""
    keys, newer = prefix("old", 6), prefix("new", 2)
    with open_store(root, quota_chunks=10) as store:
        put_prefix(store, keys)
        put_prefix(store, newer)
    with open_store(root, quota_chunks=4) as store:
        assert store.usage().used_bytes == disk_bytes(root) == 4 * CHUNK_FILE
        assert (store.match(keys), store.match(newer)) == (2, 2)


def test_files_deleted_by_hand_give_their_room_back(root):
    """Somebody empties a running cache: the account finds out when it would otherwise refuse."""
    with open_store(root, quota_chunks=4) as store:
        put_prefix(store, prefix("gone", 4))
        shutil.rmtree(root / "v1" / store.namespace.digest)
        assert put_prefix(store, prefix("new", 4)) == [PutResult.STORED] * 4
        assert store.match(prefix("new", 4)) == 4
        assert disk_bytes(root) == store.usage().used_bytes == 4 * CHUNK_FILE


@pytest.mark.parametrize("victim", ["account", "sessions", "temp", "."])
def test_any_part_may_be_deleted_while_the_store_is_open(root, victim):
    """The directory is disposable: what is lost is recomputed, the quota holds, the store goes on."""
    with open_store(root, quota_chunks=4) as store:
        put_prefix(store, prefix("before", 3))
        path = root / "v1" / victim
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        store._upkeep._restore()
        results = [put(store, key) for key in prefix("after", 6)]
        assert results[1:] == [PutResult.STORED] * 5
        assert all(holds(store, key) for key in prefix("after", 6)[-3:])
        assert disk_bytes(root) == store.usage().used_bytes <= 4 * CHUNK_FILE
        assert len(session_files(root)) == 1
        with open_store(root, quota_chunks=4, namespace=OTHER_NAMESPACE) as other:
            assert other.usage().used_bytes == disk_bytes(root)


@pytest.mark.parametrize("content", [b"", b"x", bytes(48), b"\xff" * 48, bytes(10_000)])
def test_a_damaged_account_is_counted_again(root, content):
    """Also while a store is open."""
    with open_store(root) as store:
        put_prefix(store, prefix("kept", 3))
        (root / "v1" / "account").write_bytes(content)
        assert put(store, prefix("next", 1)[0]) is PutResult.STORED
        assert store.usage().used_bytes == 4 * CHUNK_FILE


def test_a_dirty_account_is_counted_again(root):
    """The mark that a killed process leaves behind."""
    with open_store(root) as store:
        put_prefix(store, prefix("kept", 3))
        path = root / "v1" / "account"
        data = bytearray(path.read_bytes())
        import xxhash

        struct.pack_into("<QQ", data, 8, 1, 999)
        struct.pack_into("<Q", data, 40, xxhash.xxh3_64_intdigest(bytes(data[:40])))
        path.write_bytes(data)
        assert put(store, prefix("next", 1)[0]) is PutResult.STORED
        assert store.usage().used_bytes == 4 * CHUNK_FILE


def test_temporaries_of_dead_sessions_are_swept_at_open(root):
    """Theirs and unknown ones; the room they held is free."""
    with open_store(root, quota_chunks=4):
        pass
    temp = root / "v1" / "temp"
    for name in ("0123456789abcdef-1", "stray"):
        (temp / name).write_bytes(bytes(3 * CHUNK_FILE))
    (root / "v1" / "sessions" / "0123456789abcdef").write_bytes(
        struct.pack("<8s16sQQQ", b"KVSESS\x01\n", bytes(16), 1, 3 * CHUNK_FILE, 0)
    )
    with open_store(root, quota_chunks=4) as store:
        assert temporaries(root) == []
        assert [path.name for path in session_files(root)] == [store._session.id]
        assert put_prefix(store, prefix("fits", 4)) == [PutResult.STORED] * 4


def test_a_symlink_neither_counts_nor_is_followed(root, tmp_path):
    """A link to a disk full of files is not the cache's content."""
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "file").write_bytes(bytes(100_000))
    (root / "link").symlink_to(tmp_path / "big")
    (root / "loop").symlink_to(root)
    with open_store(root) as store:
        assert store.usage().used_bytes == 0


def test_a_removed_chunk_gives_its_room_back_once(root):
    """Twice removed, or removed after another process did it, is not twice accounted for."""
    keys = prefix("once", 3)
    with open_store(root) as store:
        put_prefix(store, keys)
        assert store.remove(keys[2]) and not store.remove(keys[2])
        chunk_path(store, keys[1]).unlink()
        assert not store.remove(keys[1])
        assert store.usage().used_bytes == 2 * CHUNK_FILE, "overstated until the next count, never understated"
        with open_store(root):
            pass
    with open_store(root) as store:
        assert store.usage().used_bytes == CHUNK_FILE
