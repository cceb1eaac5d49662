"""What a look from outside tells of a root, and that the look changes nothing."""

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
    open_store,
    prefix,
    put,
    put_prefix,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import Namespace, osio
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.survey import DAY_S, Part, Survey
from lmcache_nvme_backend.store.trees import find_trees

OLD_WEIGHTS = Namespace({"model": "weights:1"}, {"model_name": "/models/m"})
NEW_WEIGHTS = Namespace({"model": "weights:2"}, {"model_name": "/models/m"})
OTHER_MODEL = Namespace({"model": "weights:3"}, {"model_name": "/models/other"})


def survey(root: Path, unused_days: float = 14) -> Survey:
    (tree,) = find_trees(root)
    return tree.survey(unused_days * DAY_S)


def part_of(found: Survey, namespace: Namespace) -> Part:
    (part,) = [part for part in found.parts if part.name == namespace.digest]
    return part


def age(root: Path, namespace: Namespace, days: float) -> None:
    """Set everything of a namespace back in time."""
    then = time.time() - days * DAY_S
    for path in (root / "v1" / namespace.digest).rglob("*"):
        os.utime(path, (then, then))


def listing(root: Path) -> list[tuple[str, int, int, int]]:
    """Every path under the root with its inode, size and time."""
    found = [(str(path), path.lstat()) for path in sorted(root.rglob("*"))]
    return [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found]


def test_namespaces_are_told_with_facts_sizes_and_who_has_them_open(root):
    """Two namespaces, one of them open in this process, with the quota that its engine was given."""
    with open_store(root, namespace=OTHER_NAMESPACE) as other:
        put_prefix(other, prefix("closed", 2))
    with open_store(root, quota_chunks=50) as store:
        put_prefix(store, prefix("open", 3))
        found = survey(root)
        mine, closed = part_of(found, NAMESPACE), part_of(found, OTHER_NAMESPACE)
        assert (mine.chunks, mine.nbytes, mine.open_by) == (3, 3 * CHUNK_FILE, [os.getpid()])
        assert (closed.chunks, closed.nbytes, closed.open_by) == (2, 2 * CHUNK_FILE, [])
        assert mine.facts == {"model": "m", "dtype": "bf16", "rank": 0} and closed.facts["rank"] == 1
        assert found.nbytes == 5 * CHUNK_FILE and found.ledgers.quotas == [50 * CHUNK_FILE]
        assert found.ledgers.account_used == found.ledgers.found == disk_bytes(root)


def test_recency_is_what_the_store_keeps(root):
    """A lookup's time, once it is on disk, moves a chunk into the class of the last hour."""
    keys = prefix("recent", 4)
    with open_store(root) as store:
        put_prefix(store, keys)
    age(root, NAMESPACE, 3)
    found = part_of(survey(root), NAMESPACE)
    assert {class_.within_s: class_.chunks for class_ in found.recency} == {
        3600: 0, DAY_S: 0, 7 * DAY_S: 4, 30 * DAY_S: 0, None: 0,
    }  # fmt: skip
    with open_store(root) as store:
        assert store.match(keys[:1]) == 1
    found = part_of(survey(root), NAMESPACE)
    assert (found.recency[0].chunks, found.recency[2].chunks) == (1, 3)
    assert found.recency[0].nbytes == CHUNK_FILE


def test_weights_replaced_at_the_same_path_are_stale_and_only_they(root):
    """The path is a note in namespace.json; the older of the two, once nobody has it open, will not be asked again."""
    for namespace, days in ((OLD_WEIGHTS, 2), (OTHER_MODEL, 2), (NEW_WEIGHTS, 1)):
        with open_store(root, namespace=namespace) as store:
            put_prefix(store, prefix("weights", 2))
        age(root, namespace, days)
    found = survey(root)
    assert NEW_WEIGHTS.digest in part_of(found, OLD_WEIGHTS).stale
    assert part_of(found, NEW_WEIGHTS).stale is None and part_of(found, OTHER_MODEL).stale is None
    with open_store(root, namespace=OLD_WEIGHTS):
        found = survey(root)
        assert part_of(found, OLD_WEIGHTS).stale is None
        assert OLD_WEIGHTS.digest in part_of(found, NEW_WEIGHTS).stale


def test_what_nobody_has_used_for_days_is_stale_unless_it_is_open(root):
    """By the chunks' times and the namespace's last opening, whichever is later."""
    with open_store(root) as store:
        put_prefix(store, prefix("idle", 2))
    age(root, NAMESPACE, 20)
    assert "20.0 days" in part_of(survey(root), NAMESPACE).stale
    assert part_of(survey(root, unused_days=21), NAMESPACE).stale is None
    with open_store(root):
        assert part_of(survey(root), NAMESPACE).stale is None
    assert part_of(survey(root), NAMESPACE).stale is None  # it was open a moment ago


def test_files_that_came_by_hand_show_as_a_difference(root):
    """The account knows what the store did; the count finds what lies there."""
    with open_store(root) as store:
        put_prefix(store, prefix("counted", 2))
        (root / "v1" / NAMESPACE.digest / "note.txt").write_bytes(b"x" * 100)
        (root / "stranger").write_bytes(b"x" * 1000)
        found = survey(root)
        assert found.ledgers.found - found.ledgers.account_used == 1100
        assert part_of(found, NAMESPACE).other_bytes == 100 and found.foreign_bytes == 1000


def test_a_look_changes_nothing(root):
    """Not a byte, not a time, not a session: with and without an account."""
    with open_store(root) as store:
        put_prefix(store, prefix("left alone", 3))
    (root / "v1" / "temp" / "0123456789abcdef-1").write_bytes(b"left by a crash")
    before = listing(root)
    assert survey(root).temporaries == 1
    assert listing(root) == before
    (root / "v1" / "account").unlink()
    before = listing(root)
    assert survey(root).ledgers.account_used is None
    assert listing(root) == before


def test_a_damaged_description_leaves_the_numbers(root):
    """The words are missing, the sizes are not."""
    with open_store(root) as store:
        put(store, prefix("nameless", 1)[0])
    (root / "v1" / NAMESPACE.digest / "namespace.json").write_bytes(b"{")
    found = part_of(survey(root), NAMESPACE)
    assert (found.facts, found.model_name, found.chunks) == (None, None, 1)


def test_garbage_in_the_tree_is_never_an_error(root):
    """Files and links in the places of directories, and names that are none of ours."""
    with open_store(root) as store:
        put(store, prefix("good", 1)[0])
    directory = root / "v1" / NAMESPACE.digest
    (directory / "0a").write_bytes(b"a file in a shard's place")
    (directory / "0b").symlink_to(root)
    (root / "v1" / ("f" * 32)).write_bytes(b"a file in a namespace's place")
    (root / "v1" / "sessions" / "0123456789abcdef").write_bytes(b"short")
    (root / "v1" / "sessions" / "no session").mkdir()
    found = survey(root)
    assert [part.chunks for part in found.parts] == [1] and found.parts[0].open_by == []


def test_a_session_without_a_quota_is_read_too(root):
    """A store of an earlier release wrote a shorter record: it is live, and its quota is not known."""
    with open_store(root) as store:
        path = Path(store._session.path)
        os.truncate(path, 48)
        (peer,) = StoreTree(str(root)).peers()
        assert (peer.pid, peer.namespace, peer.quota_bytes) == (os.getpid(), NAMESPACE.digest, None)


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "foreign", "inside", "linked v1"])
def test_a_root_that_holds_neither_layout_is_refused(root, tmp_path, make):
    """One error that names it and what is allowed; nothing is made there."""
    target = root
    if make == "nothing":
        target = root / "nowhere"
    elif make == "file":
        target = root / "file"
        target.write_text("x")
    elif make == "foreign":
        (root / "v1").mkdir()
        (root / "v1" / "something").write_text("x")
    elif make == "inside":
        open_store(root).close()
        target = root / "v1"
    elif make == "linked v1":
        (tmp_path / "elsewhere").mkdir()
        open_store(tmp_path / "elsewhere").close()
        (root / "v1").symlink_to(tmp_path / "elsewhere" / "v1")
    before = listing(root)
    with pytest.raises(ConfigError) as caught:
        find_trees(target)
    assert caught.value.setting == "ROOT" and str(target) in caught.value.found
    assert listing(root) == before


def test_a_directory_that_may_not_be_read_is_an_error_and_no_empty_one(root, monkeypatch):
    """A user without the right must not be told that there is nothing."""
    open_store(root).close()
    real = osio.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("/v1"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(osio, "listdir", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        find_trees(root)


def test_a_store_notices_what_somebody_removed_and_left(root):
    """After another session has come and gone, a lookup promises no chunk of which the file is gone."""
    keys = prefix("promised", 4)
    with open_store(root) as store:
        put_prefix(store, keys)
        assert store.match(keys) == 4
        time.sleep(0.06)  # longer than file times need to settle: the lookup below trusts its memory then
        assert store.match(keys) == 4
        with open_store(root) as other:
            for key in keys[2:]:
                assert other.remove(key)
        assert store.match(keys) == 2
        assert chunk_path(store, keys[1]).exists()
