"""What a request or a model is called cannot lead out of the root; nobody else can read what lies there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD,
    aligned,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
)

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkKey, Hit, Namespace, PutResult, digest_fields, snapshot, upkeep
from lmcache_nvme_backend.store.guest import Guest
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.pruning import Selection, plan, prune
from lmcache_nvme_backend.store.verification import verify

EVIL = [
    "../../../../tmp/out",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    "a\\..\\..\\b",
    "C:\\Windows\\system32\\kernel32.dll",
    "CON",
    "NUL.txt",
    "nul\x00byte",
    "line\nfeed",
    "\ud800",
    "x" * 300,
    "ü" * 300,
    "\u202egnp.exe",
    "e\u0301",
    "\u00e9",
    "~root",
    "$(id)",
    "-rf",
    "%2e%2e%2f",
    ".. /",
]


def paths_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_no_name_of_a_request_leads_out_of_the_root(root):
    """Each name becomes a key of its own, its chunk lies below the root under hex digits alone, and comes back."""
    around = paths_below(root.parent)
    keys = [digest_fields("model", name, 0) for name in EVIL]
    assert len(set(keys)) == len(EVIL)
    with open_store(root) as store:
        for key in keys:
            assert put(store, key) is PutResult.STORED
            assert holds(store, key)
            path = chunk_path(store, key)
            assert path.resolve().is_relative_to(root / "v1" / NAMESPACE.digest)
            assert set(path.name.removesuffix(".kv")) <= set("0123456789abcdef-")
    new = paths_below(root.parent) - around
    assert new and all(path.startswith("root/v1") for path in new)


@pytest.mark.parametrize("name", [name for name in EVIL if name != "\ud800"], ids=ascii)
def test_no_name_of_a_model_leads_out_of_the_root(root, name):
    """As a fact, a fact's name and a note: the directory is a digest, the name is text in namespace.json."""
    namespace = Namespace({"model": name, name: 1, "list": [name]}, {"model_name": name})
    with open_store(root, namespace=namespace) as store:
        assert put(store, prefix("any", 1)[0]) is PutResult.STORED
        assert Path(store.directory) == root / "v1" / namespace.digest
    assert {path.name for path in (root / "v1").iterdir()} == {"account", "sessions", "temp", namespace.digest}
    (part,) = StoreTree(str(root)).survey(0).parts
    assert (part.facts, part.model_name) == (namespace.facts, name)
    assert verify(StoreTree(str(root)), False).sound
    assert {path.name for path in root.parent.iterdir()} == {"root"}


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(root):
    """A lone surrogate has no JSON: an error of the caller, not a half-made namespace."""
    with pytest.raises((UnicodeError, ValueError)):
        open_store(root, namespace=Namespace({"model": "\ud800"}))
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("key", [b"../../../../etc/x", b"short", "text" * 4, bytes(17), bytearray(16)])
def test_what_is_no_digest_is_no_key(root, key):
    """Sixteen bytes and nothing else, so that a key has exactly one path."""
    with open_store(root) as store, pytest.raises(ValueError, match="16 bytes"):
        store.put(key, aligned(b"x"), depth=0)


def test_sixteen_bytes_of_any_value_are_hex_on_disk(root):
    """Also those that spell a path."""
    with open_store(root) as store:
        for key in (ChunkKey(b"/../../../../../"), ChunkKey(b"\x00" * 16), ChunkKey(b"................")):
            assert put(store, key) is PutResult.STORED
            assert chunk_path(store, key).name.startswith(key.hex())


PERMISSIONS = """
os.umask(int(sys.argv[2], 8))
from lmcache_nvme_backend.store import upkeep
upkeep.SNAPSHOT_FROM, upkeep.GHOSTS_SHARE = 1, 0
store = open_store(root, write_budget_bytes_per_day=1 << 40)
other = open_store(root, namespace=OTHER_NAMESPACE)
put_prefix(store, prefix("mine", 4))
put_prefix(other, prefix("other", 4))
from lmcache_nvme_backend.store import osio
real = osio.rename
def look(source, target):
    show()
    real(source, target)
def show():
    for directory, names, files in os.walk(root / "v1"):
        for path in (directory, *(os.path.join(directory, name) for name in files)):
            found = os.lstat(path)
            print(("d" if os.path.isdir(path) else "f"), oct(found.st_mode & 0o7777), path[len(str(root)):])
osio.rename = look
store.match(prefix("unknown", 1))
store._upkeep._write_ghosts()
store._upkeep._write_snapshot(closed=False)
put(store, prefix("more", 1)[0])
osio.rename = real
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.pruning import Selection, plan, prune
from lmcache_nvme_backend.store.guest import Guest
tree = StoreTree(str(root))
prune(tree, plan(tree, Selection(keep_bytes=CHUNK_FILE)))
with Guest(tree.layout): show()
store.close(); other.close()
say("end")
"""


@pytest.mark.parametrize("umask", ["0", "022", "0777"])
def test_files_are_for_their_owner_alone_whatever_the_umask(root, start_child, umask):
    """Chunks, descriptions, the account, sessions, hints, the write budget, temporaries just before their publication,
    and what a tool makes: files 0600, directories 0700."""
    child = start_child(PERMISSIONS, root, umask)
    seen: dict[str, set[str]] = {"d": set(), "f": set()}
    kinds = set()
    for line in child.stdout:
        if line == "end\n":
            break
        kind, mode, path = line.rstrip("\n").split(" ", 2)
        seen[kind].add(mode)
        kinds.add(Path(path).suffix or Path(path).name)
    assert child.wait(timeout=30) == 0
    assert seen == {"d": {"0o700"}, "f": {"0o600"}}
    sessions = {kind for kind in kinds if len(kind) == 16}
    temporaries = {kind for kind in kinds if kind[16:17] == "-"}
    assert {"v1", "account", "sessions", "temp", ".kv", ".json", ".snapshot", "ghosts", "writes"} <= kinds
    assert len(sessions) == 3 and len(temporaries) == 3


def outside_store(root: Path) -> tuple[Path, list[ChunkKey]]:
    """A directory beside the root that looks like a namespace of another root, with chunks in it."""
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    keys = prefix("outside", 4)
    with open_store(elsewhere, namespace=OTHER_NAMESPACE) as store:
        put_prefix(store, keys)
    return elsewhere / "v1" / OTHER_NAMESPACE.digest, keys


def test_a_namespace_that_is_a_link_is_not_followed_out(root):
    """Not counted, evicted, pruned, verified or swept: what it points at belongs to somebody else."""
    target, _ = outside_store(root)
    before = paths_below(target)
    with open_store(root, quota_chunks=4) as store:
        (root / "v1" / OTHER_NAMESPACE.digest).symlink_to(target)
        for name in ("one", "two", "three"):
            assert put_prefix(store, prefix(name, 4)) == [PutResult.STORED] * 4
        assert store.usage().used_bytes == disk_bytes(root) == 4 * CHUNK_FILE
        tree = StoreTree(str(root))
        assert [part.name for part in tree.survey(0).parts] == [NAMESPACE.digest]
        assert verify(tree, remove_bad=True).chunks == 4
        assert prune(tree, plan(tree, Selection(keep_bytes=0))).chunks == 4
        assert store.usage().used_bytes == 0
    assert paths_below(target) == before
    with open_store(root, quota_chunks=4, namespace=OTHER_NAMESPACE) as store:
        assert put_prefix(store, prefix("inside", 2)) == [PutResult.STORED] * 2
        assert not (root / "v1" / OTHER_NAMESPACE.digest).is_symlink()
    assert paths_below(target) == before


def test_a_shard_that_is_a_link_is_not_followed_out(root):
    """A store puts a directory in its place; what a plan had chosen there is spared."""
    target, _ = outside_store(root)
    key = prefix("linked", 1)[0]
    shard = root / "v1" / NAMESPACE.digest / key.hex()[:2]
    victim = target / "victims"
    victim.mkdir()
    with open_store(root) as store:
        shard.symlink_to(victim)
        assert put(store, key) is PutResult.STORED
        assert list(victim.iterdir()) == [] and not shard.is_symlink() and holds(store, key)
        tree = StoreTree(str(root))
        chosen = plan(tree, Selection(keep_bytes=0))
        moved = chunk_path(store, key).rename(victim / chunk_path(store, key).name)
        shard.rmdir()
        shard.symlink_to(victim)
        done = prune(tree, chosen)
        assert (done.chunks, done.spared) == (0, 1) and moved.exists()
        assert verify(tree, remove_bad=True).strays == [str(shard)] and moved.exists()


@pytest.mark.parametrize("name", ["v1", "v1/temp", "v1/sessions"])
def test_a_root_whose_own_directories_are_links_is_refused(root, name):
    """What sweeps them would sweep somebody else's."""
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep").write_text("mine")
    (root / "v1").mkdir()
    if name == "v1":
        (root / "v1").rmdir()
    (root / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not a directory"):
        open_store(root)
    assert (elsewhere / "keep").exists()


def test_links_among_the_temporaries_go_and_what_they_point_at_stays(root):
    """A sweep removes names."""
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep").write_text("mine")
    open_store(root).close()
    for name, target in (("0123456789abcdef-1", elsewhere), ("0123456789abcdef-2", elsewhere / "keep")):
        (root / "v1" / "temp" / name).symlink_to(target)
    with Guest(StoreTree(str(root)).layout):
        assert list((root / "v1" / "temp").iterdir()) == []
    assert (elsewhere / "keep").read_text() == "mine"


def test_a_link_in_a_chunks_place_is_never_read(root):
    """Whatever it points at, even the right bytes."""
    key = prefix("pointed", 1)[0]
    with open_store(root) as store:
        put(store, key)
        path = chunk_path(store, key)
        aside = root.parent / "aside"
        path.rename(aside)
        path.symlink_to(aside)
        buffer = aligned(bytes(PAYLOAD))
        assert not isinstance(store.get(key, buffer), Hit)
        assert aside.exists() and not path.is_symlink()
        assert stat.S_ISREG(aside.lstat().st_mode) and payload_of(key) in aside.read_bytes()
        assert list(path.parent.iterdir()) == []


def test_no_hint_is_written_through_a_link(root, tmp_path, monkeypatch):
    """A link that takes the place of the namespace while the store is open leads nowhere."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_FROM", 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / snapshot.FILE).write_text("somebody's")
    with open_store(root) as store:
        put_prefix(store, prefix("x", 3))
        Path(store.directory).rename(tmp_path / "moved")
        Path(store.directory).symlink_to(outside)
        store._upkeep._write_snapshot(closed=False)
    assert (outside / snapshot.FILE).read_text() == "somebody's"
    assert paths_below(outside) == {snapshot.FILE}
