"""The index's snapshot: it makes a large store usable at once, keeps the order, and is believed in nothing else."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
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
    prefix,
    put,
    put_prefix,
    temporaries,
)

from lmcache_nvme_backend.store import ChunkStore, PutResult, StoreSettings, census, recovery, snapshot, upkeep
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.policy import TailFirstLru
from lmcache_nvme_backend.store.snapshot import Snapshot
from lmcache_nvme_backend.store.verification import verify

KEYS = prefix("snapshot", 6)


@pytest.fixture(autouse=True)
def small_counts_as_large(monkeypatch):
    """A namespace of five chunks has a snapshot, and opens from it."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_FROM", 5)
    monkeypatch.setattr(upkeep, "RANK_AT_OPEN", 4)
    monkeypatch.setattr(census, "RANK_AT_OPEN", 4)


def file_of(root: Path, namespace=NAMESPACE) -> Path:
    return root / "v1" / namespace.digest / snapshot.FILE


def wait_until_counted(opened: ChunkStore) -> None:
    """Until the directory behind a snapshot has been listed, and ranked where that was still to be done."""
    deadline = time.monotonic() + 20
    while opened._census.unlisted or not opened._upkeep._ranked:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def filled(root: Path, **settings) -> None:
    with open_store(root, **settings) as opened:
        assert set(put_prefix(opened, KEYS)) == {PutResult.STORED}
        opened.match(KEYS[:2])


def test_the_order_of_eviction_survives_without_reading_a_files_time(root, monkeypatch):
    """After a close the next store evicts in the very order that the last one would have, and reads no chunk's time."""
    with open_store(root) as opened:
        put_prefix(opened, KEYS)
        put_prefix(opened, other := prefix("other", 3))
        opened.match(KEYS[:4])
        expected = opened._index.coldest_first()
    assert {*KEYS, *other} == set(expected)
    asked = []
    monkeypatch.setattr(recovery, "file_time", lambda path, real=recovery.file_time: asked.append(path) or real(path))
    with open_store(root) as opened:
        assert opened._index.coldest_first() == expected
        wait_until_counted(opened)
        assert opened._index.coldest_first() == expected
        assert all(holds(opened, key) for key in KEYS)
    assert not [path for path in asked if path.endswith(".kv")]


def test_a_chunk_that_is_named_and_gone_is_a_miss_and_then_forgotten(root):
    """Deleted while nobody looked: never served, and out of index and account once the directory is listed."""
    filled(root)
    with open_store(root) as opened:
        gone = chunk_path(opened, KEYS[3])
    gone.unlink()
    with open_store(root) as opened:
        assert not holds(opened, KEYS[3])
        wait_until_counted(opened)
        assert opened.match(KEYS) == 3
        assert opened.usage().namespace_chunks == 5
        assert opened.usage().used_bytes == disk_bytes(root)


def test_a_chunk_that_is_there_and_not_named_is_found(root):
    """A snapshot from before a chunk was stored: the listing finds it."""
    filled(root)
    late = prefix("late", 1)[0]
    old = file_of(root).read_bytes()
    with open_store(root) as opened:
        put(opened, late)
    file_of(root).write_bytes(old)
    with open_store(root) as opened:
        wait_until_counted(opened)
        assert holds(opened, late)
        assert all(holds(opened, key) for key in KEYS)
        assert opened.usage().used_bytes == disk_bytes(root)


def test_a_chunk_that_is_removed_while_the_directory_is_counted_is_accounted_once(root, monkeypatch):
    """Who removes one takes it out of the index first and waits for the lock: its file is counted until then."""
    filled(root)
    monkeypatch.setattr(upkeep.Upkeep, "_count", lambda self: None)
    with open_store(root) as opened:
        real, removing = opened._index.reconcile, []

        def meanwhile(shards):
            found = real(shards)
            removing.append(threading.Thread(target=opened.remove, args=(KEYS[4],)))
            removing[0].start()
            while KEYS[4] in opened._index:
                time.sleep(0.001)
            return found

        monkeypatch.setattr(opened._index, "reconcile", meanwhile)
        with opened._account.locked(5):
            assert removing[0].is_alive()
        removing[0].join(30)
        assert opened.usage().used_bytes == disk_bytes(root)
        assert len(list(root.glob("v1/*/*/*.kv"))) == len(KEYS) - 1


def test_a_chunk_that_lies_there_twice_is_kept_once(root):
    """A copy under a name of another depth goes away when the directory is listed."""
    filled(root)
    with open_store(root) as opened:
        path = chunk_path(opened, KEYS[1])
    shutil.copy(path, path.with_name(path.name.replace("-00000001-", "-00000009-")))
    with open_store(root) as opened:
        wait_until_counted(opened)
        assert len(list(path.parent.glob(f"{KEYS[1].hex()}-*"))) == 1
        assert opened.usage().used_bytes == disk_bytes(root)


def test_it_counts_in_the_quota(root):
    """The account holds its bytes from when it is written, and again after it is written anew or removed."""
    filled(root)
    size = file_of(root).stat().st_size
    assert size == snapshot.size_of(len(KEYS))
    with open_store(root) as opened:
        wait_until_counted(opened)
        assert opened.usage().used_bytes == disk_bytes(root) == len(KEYS) * CHUNK_FILE + size
        put_prefix(opened, prefix("more", 3))
        opened._upkeep._write_snapshot(closed=False)
        assert opened.usage().used_bytes == disk_bytes(root)
        assert file_of(root).stat().st_size == snapshot.size_of(len(KEYS) + 3)
        opened.clear()
    assert not file_of(root).exists()
    with open_store(root) as opened:
        assert opened.usage().used_bytes == 0


def test_files_that_came_meanwhile_count_before_anything_is_stored(root):
    """Opened from a snapshot, the first store counts the directory: the quota holds from the first byte on."""
    filled(root, quota_chunks=8)
    (root / "foreign").write_bytes(bytes(2 * CHUNK_FILE))
    with open_store(root, quota_chunks=8) as opened:
        for key in prefix("new", 4):
            put(opened, key)
            assert disk_bytes(root) <= 8 * CHUNK_FILE


def test_a_store_that_ended_without_closing_is_ranked_by_its_files_times(root):
    """What was used after the last snapshot is known from the files, as without one."""
    with open_store(root) as opened:
        put_prefix(opened, KEYS)
        opened._upkeep._write_snapshot(closed=False)
        paths = {key: chunk_path(opened, key) for key in KEYS}
        kept = file_of(root).read_bytes()
    file_of(root).write_bytes(kept)
    for age, key in enumerate(KEYS):  # the head is the oldest now
        os.utime(paths[key], ns=(time.time_ns() + age * 10**9,) * 2)
    with open_store(root) as opened:
        wait_until_counted(opened)
        assert opened._index.coldest_first() == KEYS


def test_it_is_written_now_and_then_and_only_where_something_changed(root, monkeypatch):
    """A store that runs for weeks leaves a snapshot without closing; while nobody uses it, nothing is written."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_INTERVAL_S", 0.0)
    monkeypatch.setattr(upkeep, "UPKEEP_INTERVAL_S", 0.01)
    written = []
    real = upkeep.Upkeep._write_snapshot
    monkeypatch.setattr(
        upkeep.Upkeep, "_write_snapshot", lambda self, closed: written.append(closed) or real(self, closed)
    )
    with open_store(root) as opened:
        put_prefix(opened, KEYS)
        deadline = time.monotonic() + 20
        while not file_of(root).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        found = snapshot.read(str(file_of(root).parent), NAMESPACE.raw_digest)
        assert found is not None
        assert not found.closed
        time.sleep(0.1)  # several intervals
        before = len(written)
        time.sleep(0.1)
        assert len(written) == before
        assert opened.usage().used_bytes == disk_bytes(root)


class Remembering(TailFirstLru):
    def __init__(self):
        super().__init__()
        self.known = {}

    def load(self, coldest_first, states=()):
        super().load(coldest_first)
        self.known = {key: state for key, state in zip(coldest_first, states) if state}

    def frozen(self):
        work = super().frozen()
        return lambda: (work()[0], self.known)


@pytest.mark.parametrize("chunks", [4, 6], ids=["listed", "from the snapshot"])
def test_what_the_policy_knows_of_chunks_survives(root, monkeypatch, chunks):
    """A number a chunk, also where the namespace is so small that its directory is listed at once."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_FROM", 1)
    settings = StoreSettings(quota_bytes=100 * CHUNK_FILE)
    first = Remembering()
    with ChunkStore.open(root, NAMESPACE, settings, first) as opened:
        put_prefix(opened, KEYS[:chunks])
        first.known = {KEYS[0]: 3, KEYS[2]: 70_000}
    second = Remembering()
    with ChunkStore.open(root, NAMESPACE, settings, second) as opened:
        wait_until_counted(opened)
        assert second.known == {KEYS[0]: 3, KEYS[2]: snapshot.MAX_STATE}


def written(path: Path, found: Snapshot) -> bytes:
    data = b"".join(snapshot.encode(found, NAMESPACE.raw_digest))
    path.mkdir(exist_ok=True)
    (path / snapshot.FILE).write_bytes(data)
    return data


def test_what_is_written_is_what_is_read(tmp_path):
    """Every column, in order; and the size is known beforehand."""
    rng = random.Random(1)
    keys = [rng.randbytes(16) for _ in range(1000)]
    numbers = [[rng.randrange(2**bits) for _ in keys] for bits in (32, 32, 16)]
    given = Snapshot(keys, *numbers, True)
    assert len(written(tmp_path, given)) == snapshot.size_of(1000)
    found = snapshot.read(str(tmp_path), NAMESPACE.raw_digest)
    columns = [list(column) for column in (found.keys, found.depths, found.blocks, found.states)]
    assert columns == [keys, *numbers] and found.closed


def test_no_damage_passes(tmp_path):
    """Every single flipped bit, every length, and a snapshot of something else."""
    data = written(tmp_path, Snapshot(list(KEYS), list(range(6)), [3] * 6, [1, 0, 0, 0, 0, 0]))
    path = tmp_path / snapshot.FILE

    def refused(damaged: bytes) -> bool:
        path.write_bytes(damaged)
        try:
            return snapshot.read(str(tmp_path), NAMESPACE.raw_digest) is None
        except ValueError:
            return True

    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        assert refused(flipped), at
        assert refused(data[:at]), at
    assert refused(data + b"\0")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="another namespace"):
        snapshot.read(str(tmp_path), OTHER_NAMESPACE.raw_digest)


@pytest.mark.parametrize("kind", ["noise", "truncated", "foreign", "directory", "symlink", "fifo", "empty"])
def test_a_bad_one_is_counted_and_ignored(root, tmp_path, kind):
    """The store opens by listing its directory, serves everything, and leaves a good one behind."""
    filled(root)
    path, good = file_of(root), file_of(root).read_bytes()
    path.unlink()
    match kind:
        case "noise":
            path.write_bytes(random.Random(3).randbytes(len(good)))
        case "truncated":
            path.write_bytes(good[:-20])
        case "foreign":
            found = snapshot.Snapshot(list(KEYS), [0] * 6, [3] * 6)
            path.write_bytes(b"".join(snapshot.encode(found, OTHER_NAMESPACE.raw_digest)))
        case "directory":
            path.mkdir()
        case "symlink":
            (tmp_path / "elsewhere").write_bytes(good)
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            os.mkfifo(path)
        case "empty":
            path.touch()
    with open_store(root) as opened:
        assert opened.stats.snapshots_ignored == 1
        assert opened.match(KEYS) == 6
        assert all(holds(opened, key) for key in KEYS)
    if kind != "directory":
        assert len(snapshot.read(str(path.parent), NAMESPACE.raw_digest)) == 6


def test_a_dead_namespace_goes_with_its_snapshot(root):
    """When its chunks were evicted for another model, nothing of it stays behind."""
    filled(root, quota_chunks=8)
    with open_store(root, quota_chunks=8, namespace=OTHER_NAMESPACE) as opened:
        put_prefix(opened, prefix("others", 12))
        assert not file_of(root).parent.exists()
        assert opened.usage().used_bytes == disk_bytes(root)


def test_verify_knows_it_and_removes_a_bad_one(root):
    """`kvtier store verify`: a good snapshot is no stray, a damaged one is named, and with --remove-bad gone."""
    filled(root)
    tree = StoreTree(str(root))
    assert verify(tree, remove_bad=False).sound
    assert not verify(tree, remove_bad=False).strays
    data = bytearray(file_of(root).read_bytes())
    data[50] ^= 1
    file_of(root).write_bytes(data)
    (bad,) = verify(tree, remove_bad=False).bad
    assert bad.path == str(file_of(root))
    assert file_of(root).exists()
    verify(tree, remove_bad=True)
    assert not file_of(root).exists()
    with open_store(root) as opened:
        assert opened.usage().used_bytes == disk_bytes(root)
        assert all(holds(opened, key) for key in KEYS)


def test_a_full_quota_costs_the_snapshot_and_nothing_else(root):
    """Nothing that could be evicted for it: there is none, and the chunks stay."""
    with open_store(root, quota_chunks=len(KEYS)) as opened:
        put_prefix(opened, KEYS)
        for key in KEYS:
            opened.pin(key)
    assert not file_of(root).exists()
    with open_store(root, quota_chunks=len(KEYS)) as opened:
        assert all(holds(opened, key) for key in KEYS)
        assert not temporaries(root)


def test_killed_while_writing_one(root, start_child):
    """SIGKILL at any moment: the old one or the new one is there, nothing half, and every chunk is served."""
    filled(root)
    program = """
from lmcache_nvme_backend.store import upkeep
upkeep.SNAPSHOT_FROM = 1
with open_store(root) as opened:
    say("ready")
    while True:
        opened._upkeep._write_snapshot(closed=False)
"""
    for attempt in range(5):
        child = start_child(program, root)
        assert child.stdout.readline() == "ready\n"
        time.sleep(random.Random(attempt).uniform(0, 0.02))
        child.kill()
        child.wait()
        assert len(snapshot.read(str(file_of(root).parent), NAMESPACE.raw_digest)) == 6
        with open_store(root) as opened:
            assert not opened.stats.snapshots_ignored
            wait_until_counted(opened)
            assert all(holds(opened, key) for key in KEYS)
            assert not temporaries(root)
            assert opened.usage().used_bytes == disk_bytes(root)
