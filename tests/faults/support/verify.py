"""A fresh process's look at a root whose last process was killed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from lmcache_nvme_backend.store import ChunkStore, StoreSettings, account, upkeep
from lmcache_nvme_backend.store.format import BLOCK
from tests.faults.support.record import Did, Record, descriptor_free
from tests.faults.support.workload import NAMESPACES, QUOTA, Workload, chunk_files, small_counts_as_large
from tests.unit.store.store_helpers import disk_bytes, session_files, temporaries

COUNTED_WITHIN_S = 30.0
PROBED = bytes(range(256)) * (BLOCK // 256)


class Broken(Exception):
    """A promise that was not kept; `kind` is a column of the table."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def need(condition: bool, kind: str, text: str) -> None:
    if not condition:
        raise Broken(kind, text)


def left_in_a_probe(root: Path) -> bool:
    """Whether a process was killed while it tried direct I/O: that one block is not reserved."""
    return any(path.stat().st_size == BLOCK and path.read_bytes() == PROBED for path in root.glob("v1/temp/*"))


def account_is_right(root: Path) -> bool:
    """Whether what a killed process has left in the account is the disk's, or marked as in doubt, while another one has
    the root open and rests, but for its background thread."""
    for _ in range(200):
        before = account.look(str(root / "v1" / "account"))
        found = sum(disk_bytes(part) for part in root.glob("v1/*") if part.name != "temp")
        steady = before == account.look(str(root / "v1" / "account"))
        if steady and (before is None or before[1] or before[0].used == found):
            return True
        time.sleep(0.01)
    return False


def look_as_at_a_large_store() -> None:
    """In this process `verify` opens from whatever snapshots were left, and leaves them as they are."""
    small_counts_as_large()
    upkeep.Upkeep._write_snapshot = lambda self, closed: None


def wait_until_counted(store: ChunkStore) -> None:
    """Until the directory behind a snapshot has been listed, where the store was opened from one."""
    deadline = time.monotonic() + COUNTED_WITHIN_S
    while store._census.unlisted or not store._upkeep._ranked:
        need(time.monotonic() < deadline, "other", "the directory behind a snapshot is not counted")
        time.sleep(0.001)


def verify(root: Path, seed: int, record: Record) -> None:
    """Raises `Broken`; every chunk that is found with its right bytes goes to `record`."""
    weight = disk_bytes(root) - BLOCK * left_in_a_probe(root)
    need(weight <= QUOTA, "over quota", f"{weight} bytes on the disk before the open, of {QUOTA}")
    files = list(chunk_files(root))
    found = 0
    for which, namespace in enumerate(NAMESPACES):
        with ChunkStore.open(root, namespace, StoreSettings(quota_bytes=QUOTA, lock_wait_s=2.0)) as store:
            wait_until_counted(store)
            need(temporaries(root) == [], "other", f"temporaries are left: {temporaries(root)}")
            need(len(session_files(root)) == 1, "other", f"sessions are left: {session_files(root)}")
            usage = store.usage()
            need(usage.used_bytes <= QUOTA, "over quota", f"{usage.used_bytes} bytes in the account")
            need(
                (usage.used_bytes, usage.reserved_bytes) == (disk_bytes(root), 0),
                "other", f"the account says {usage}, the disk {disk_bytes(root)}",
            )  # fmt: skip
            reader = Workload(seed, which, store, record, random.Random(0))
            for key in store._index.all_keys():
                right = reader.loads_right(key)
                need(right is not False, "wrong", f"wrong bytes under {key.hex()} of namespace {which}")
                need(right is True, "other", f"{key.hex()} of namespace {which} is there and does not load")
                record.append(Did.FOUND, which, key)
                found += 1
            need(not sum(store.stats.corrupt.values()), "other", f"a kill left a bad chunk: {store.stats.corrupt}")
    need(len(files) == found, "other", f"{len(files)} chunk files, of which {found} are found")
    need(session_files(root) == [], "other", "a closed store left its session")
    need(descriptor_free(os.fspath(root / "v1" / "account")), "other", "the root's lock is held")
