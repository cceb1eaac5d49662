"""What is removed, in which order, with the account right, and never to an engine's harm."""

from __future__ import annotations

import os
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
    put_prefix,
    session_files,
    temporaries,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import Namespace, account, osio
from lmcache_nvme_backend.store.guest import Guest
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.pruning import Plan, Selection, plan, prune
from lmcache_nvme_backend.store.survey import DAY_S

THIRD_NAMESPACE = Namespace({"model": "third"})


def tree_at(root: Path) -> StoreTree:
    return StoreTree(str(root))


def planned(root: Path, **conditions: object) -> Plan:
    return plan(tree_at(root), Selection(unused_s=14 * DAY_S, **conditions))  # type: ignore[arg-type]


def pruned(root: Path, **conditions: object) -> tuple[int, int]:
    """(chunks, bytes) removed; the account is the disk's afterwards, and nothing of the tool is left."""
    done = prune(tree_at(root), planned(root, **conditions))
    assert done.failed == 0
    look = account.look(str(root / "v1" / "account"))
    assert look is not None and look[0].used == disk_bytes(root) and not look[1]
    return done.chunks, done.nbytes


def age(root: Path, days: float, namespace: Namespace = NAMESPACE) -> None:
    then = time.time() - days * DAY_S
    for path in (root / "v1" / namespace.digest).rglob("*"):
        os.utime(path, (then, then))


def digests(root: Path) -> set[str]:
    return {path.name for path in (root / "v1").iterdir() if len(path.name) == 32}


def test_a_plan_removes_nothing(root):
    """What `--dry-run` shows is only looked at."""
    with open_store(root) as store:
        put_prefix(store, prefix("planned", 4))
    before = sorted(path.lstat().st_mtime_ns for path in root.rglob("*"))
    chosen = planned(root, keep_bytes=0)
    assert (chosen.chunks, chosen.nbytes) == (4, 4 * CHUNK_FILE)
    assert sorted(path.lstat().st_mtime_ns for path in root.rglob("*")) == before


def test_older_than_leaves_what_was_used_since(root):
    """By the time of last use: a lookup five minutes ago keeps a chunk that was stored a week ago."""
    keys = prefix("aged", 4)
    with open_store(root) as store:
        put_prefix(store, keys)
    age(root, 8)
    with open_store(root) as store:
        assert store.match(keys[:2]) == 2
    assert pruned(root, older_than_s=7 * DAY_S) == (2, 2 * CHUNK_FILE)
    with open_store(root) as store:
        assert [holds(store, key) for key in keys] == [True, True, False, False]


def test_keep_evicts_as_the_store_does(root):
    """Namespaces that nobody has open go first, then the tail of the longest unused prefix; the head stays."""
    keys = prefix("kept", 4)
    with open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("idle", 2))
    with open_store(root) as store:
        put_prefix(store, keys)
        assert store.match(keys) == 4
        store._upkeep._flush(100)
        assert pruned(root, keep_bytes=4 * CHUNK_FILE) == (2, 2 * CHUNK_FILE)
        assert digests(root) == {NAMESPACE.digest}
        assert pruned(root, keep_bytes=int(2.5 * CHUNK_FILE)) == (2, 2 * CHUNK_FILE)
        assert store.match(keys) == 2
        assert [holds(store, key) for key in keys] == [True, True, False, False]
        assert pruned(root, keep_bytes=2 * CHUNK_FILE) == (0, 0)


def test_a_namespace_goes_whole_with_its_directory_unless_it_is_open(root):
    """An engine's own directory and description stay while it lives; its chunks can go."""
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        with open_store(root, namespace=namespace) as store:
            put_prefix(store, prefix("named", 3))
    assert pruned(root, namespace=OTHER_NAMESPACE.digest[:8]) == (3, 3 * CHUNK_FILE)
    assert digests(root) == {NAMESPACE.digest}
    with open_store(root) as store:
        assert pruned(root, namespace=NAMESPACE.digest) == (3, 3 * CHUNK_FILE)
        assert (root / "v1" / NAMESPACE.digest / "namespace.json").exists()
        assert store.match(prefix("named", 3)) == 0
        assert [result.kept for result in put_prefix(store, prefix("named", 3))] == [True] * 3


def test_stale_takes_what_nobody_has_open_and_conditions_add_up(root):
    """--stale with --namespace is only that one."""
    for namespace, days in ((NAMESPACE, 20), (OTHER_NAMESPACE, 30), (THIRD_NAMESPACE, 1)):
        with open_store(root, namespace=namespace) as store:
            put_prefix(store, prefix("stale", 2))
        age(root, days, namespace)
    with open_store(root):
        assert planned(root, stale=True).chunks == 2
    age(root, 20)
    assert planned(root, stale=True, namespace=NAMESPACE.digest).chunks == 2
    assert pruned(root, stale=True) == (4, 4 * CHUNK_FILE)
    assert digests(root) == {THIRD_NAMESPACE.digest}


def test_what_is_used_or_opened_after_the_choice_stays(root):
    """Between the question and the answer an engine may start."""
    keys = prefix("meanwhile", 3)
    with open_store(root) as store:
        put_prefix(store, keys)
    age(root, 20)
    by_age, by_staleness = planned(root, older_than_s=DAY_S), planned(root, stale=True)
    with open_store(root) as store:
        assert store.match(keys[:1]) == 1
    with open_store(root):
        assert prune(tree_at(root), by_staleness).spared == 3
    done = prune(tree_at(root), by_age)
    assert (done.chunks, done.spared) == (2, 1)
    with open_store(root) as store:
        assert [holds(store, key) for key in keys] == [True, False, False]


def test_what_an_engine_evicted_first_is_not_accounted_twice(root):
    """Whoever removes the file takes it out of the account."""
    keys = prefix("raced", 3)
    with open_store(root) as store:
        put_prefix(store, keys)
        chosen = planned(root, keep_bytes=0)
        assert store.remove(keys[0])
        done = prune(tree_at(root), chosen)
        assert (done.chunks, done.gone) == (2, 1)
        assert store.usage().used_bytes == disk_bytes(root) == 0


def test_a_root_that_nobody_has_open_is_counted_first(root):
    """Files that went by hand since the last engine left do not stay in the account."""
    keys = prefix("by hand", 4)
    with open_store(root) as store:
        put_prefix(store, keys)
        path = chunk_path(store, keys[0])
    path.unlink()
    assert pruned(root, keep_bytes=2 * CHUNK_FILE) == (1, CHUNK_FILE)


def test_a_file_that_cannot_be_removed_is_counted_and_stays_accounted(root, monkeypatch):
    """Read-only media, an immutable file."""
    with open_store(root) as store:
        put_prefix(store, prefix("stuck", 2))

    def refuse(path: str) -> None:
        if path.endswith(".kv"):
            raise PermissionError(1, "Operation not permitted", path)
        os.unlink(path)  # noqa: PTH108

    with monkeypatch.context() as patched:
        patched.setattr(osio, "unlink", refuse)
        done = prune(tree_at(root), planned(root, keep_bytes=0))
    assert (done.chunks, done.failed) == (0, 2)
    look = account.look(str(root / "v1" / "account"))
    assert look is not None and look[0].used == disk_bytes(root) == 2 * CHUNK_FILE


def test_a_lock_that_is_not_to_be_had_is_one_error(root, start_child):
    """It names the process that holds it; nothing is removed, no session is left."""
    with open_store(root) as store:
        put_prefix(store, prefix("locked", 2))
    program = """
store = open_store(root)
with store._account.locked(1):
    say("locked"); sys.stdin.readline()
"""
    child = start_child(program, root)
    assert child.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match=str(child.pid)), Guest(tree_at(root).layout, lock_wait_s=0.05):
        pass
    assert disk_bytes(root) == 2 * CHUNK_FILE and len(session_files(root)) == 1


def test_a_killed_tool_leaves_a_root_that_the_next_engine_opens(root, start_child):
    """In the middle of a removal, inside the lock: the account is right again, its session is swept."""
    program = """
from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.pruning import Selection, plan, prune
with open_store(root) as store: put_prefix(store, prefix("killed", 6))
real = osio.unlink
def stuck(path):
    real(path)
    if path.endswith(".kv"): say("removed one"); time.sleep(60)
osio.unlink = stuck
tree = StoreTree(str(root))
prune(tree, plan(tree, Selection(keep_bytes=0)))
"""
    child = start_child(program, root)
    assert child.stdout.readline() == "removed one\n"
    child.kill()
    child.wait()
    with open_store(root, lock_wait_s=5) as store:
        assert store.usage().used_bytes == disk_bytes(root) == 5 * CHUNK_FILE
        assert len(session_files(root)) == 1 and temporaries(root) == []


ENGINE = """
store = open_store(root, quota_chunks=60)
other = open_store(root, quota_chunks=60, namespace=OTHER_NAMESPACE)
say("ready")
turns = hits = dropped = 0
import threading
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
while not stop.is_set():
    for each, name in ((store, "mine"), (other, "other")):
        keys = prefix(f"{name}{turns % 7}", 6)
        dropped += sum(not result.kept for result in put_prefix(each, keys))
        found = each.match(keys, pin=True)
        hits += sum(holds(each, key) for key in keys[:found])
        for key in keys[:found]: each.unpin(key)
    turns += 1
say(turns, hits, dropped, sum(store.stats.corrupt.values()) + sum(other.stats.corrupt.values()))
say(store.usage().used_bytes, store.usage().reserved_bytes)
sys.stdin.readline()
store.close(); other.close()
say(len(list((root / "v1" / "sessions").iterdir())))
"""


def test_an_engine_that_stores_and_loads_meanwhile_sees_nothing_but_misses(root, start_child):
    """Look, verification and every kind of pruning, again and again beside two live stores in another process: all that
    they load is right, no store is dropped, nothing is found bad, the quota holds, and the account is the disk's."""
    from lmcache_nvme_backend.store.verification import verify

    engine = start_child(ENGINE, root)
    assert engine.stdout.readline() == "ready\n"
    removed = checked = 0
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        for conditions in ({"keep_bytes": 20 * CHUNK_FILE}, {"namespace": OTHER_NAMESPACE.digest}, {"keep_bytes": 0}):
            found = tree_at(root).survey(DAY_S)
            assert len(found.parts) == 2 and all(part.stale is None for part in found.parts)
            done = prune(tree_at(root), planned(root, **conditions))
            assert done.failed == 0
            removed += done.chunks
            result = verify(tree_at(root), remove_bad=True)
            assert result.sound, result
            checked += result.chunks
            assert disk_bytes(root) <= 60 * CHUNK_FILE
    engine.stdin.write("stop\n")
    engine.stdin.flush()
    turns, hits, dropped, corrupt = map(int, engine.stdout.readline().split())
    assert turns > 0 and hits > 0 and (dropped, corrupt) == (0, 0)
    assert removed > 20 and checked > 0
    used, reserved = map(int, engine.stdout.readline().split())
    assert (used, reserved) == (disk_bytes(root), 0)
    engine.stdin.write("end\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "0\n"
    assert engine.wait(timeout=30) == 0
