"""Reading a root's directories: the index of a namespace, and the size of everything. No error on any garbage."""

from __future__ import annotations

import stat
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.format import BLOCK, parse_names
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import VERSION_DIR, Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, is_namespace_dir
from lmcache_nvme_backend.store.settings import CHEAP_LISTING

SHARDS = tuple(f"{number:02x}" for number in range(256))
_SHARDS = frozenset(SHARDS)
# An open writes an account, a session, namespace.json and a probe: a block each, and as much again for directories.
_OPENING_BYTES: Final = 16 * BLOCK
_LISTERS: Final = 4

Chunk = tuple[ChunkKey, int, int]  # key, depth, blocks


def list_dir(path: str) -> list[str]:
    """The names in a directory; none where it cannot be listed."""
    try:
        return list_dir_or_raise(path)
    except OSError:
        return []


def list_dir_or_raise(path: str) -> list[str]:
    """The names in a directory; none where there is no such directory. For counting: a directory that cannot be
    listed must not pass for an empty one."""
    try:
        if not stat.S_ISDIR(osio.lstat(path).st_mode):
            return []
        return osio.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_time(path: str) -> int | None:
    """When a chunk was last used (ns), None where it is gone."""
    try:
        return osio.lstat(path).st_mtime_ns
    except OSError:
        return None


def is_gone(path: str) -> bool:
    """Whether a file is certainly not there: an error that tells nothing about it is no proof."""
    try:
        osio.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def is_link(path: str) -> bool:
    """Whether a link has this name: its target is not the store's. Raises `OSError` where that cannot be told."""
    try:
        return stat.S_ISLNK(osio.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def leads_outside(path: str) -> bool:
    """Whether a link has taken the place of a directory of the store on the way to a chunk or a temporary, so that
    this path would lead to files that are not the store's. Raises `OSError` where that cannot be told."""
    shard = path.rpartition("/")[0]
    namespace = shard.rpartition("/")[0]
    base = namespace.rpartition("/")[0]  # for a temporary these three are temp, the base and the root
    return is_link(base) or is_link(namespace) or is_link(shard)


def shard_chunks(namespace_dir: str, shard: str) -> Iterator[Chunk]:
    chunks, _ = parse_names(list_dir(f"{namespace_dir}/{shard}"), shard)
    return chunks


def namespace_chunks(namespace_dir: str) -> Iterator[Chunk]:
    """Every chunk of a namespace, by name alone."""
    there = frozenset(list_dir(namespace_dir))
    for shard in SHARDS:
        if shard in there:
            yield from shard_chunks(namespace_dir, shard)


def give_way(layout: Layout) -> bool:
    """Remove the chunks unused for longest, of any namespace, until a store has room for what it keeps about itself;
    whether any went. For an open on a full disk, which finds no room to begin with; the account is to be counted anew.
    """
    chunks = []
    for digest in filter(is_namespace_dir, list_dir(layout.base)):
        for key, depth, blocks in namespace_chunks(layout.namespace(digest)):
            path = layout.chunk(digest, key, depth, blocks)
            chunks.append((file_time(path) or 0, -depth, path, blocks * BLOCK))
    freed = 0
    for _, _, path, nbytes in sorted(chunks):
        if freed >= _OPENING_BYTES:
            break
        if osio.unlink_quietly(path):
            freed += nbytes
    return freed > 0


def _listings(directory: str, shards: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(shard, its names) of each; raises `OSError`.

    A file system reads a cold directory block by block, each one awaited: four at a time take less than half of the
    time of one after the other. The first tells whether they are large enough for that.
    """
    large = False
    for name in shards[:1]:
        first = list_dir_or_raise(f"{directory}/{name}")
        large = len(first) > CHEAP_LISTING
        yield name, first
    listers = _Listers() if large else None
    if listers is None or not listers.count:
        yield from ((name, list_dir_or_raise(f"{directory}/{name}")) for name in shards[1:])
        return
    ahead: deque[tuple[str, Future[list[str]]]] = deque()
    try:
        for name in shards[1:]:
            ahead.append((name, listers.submit(f"{directory}/{name}")))
            if len(ahead) > listers.count:
                done, listing = ahead.popleft()
                yield done, listing.result()
        for done, listing in ahead:
            yield done, listing.result()
    finally:
        listers.end()


class _Listers:
    """Threads that list directories. Daemons and no executor's, since the interpreter's exit waits for those, and must
    not wait for a disk that hangs. As many as can be had: a process may be at its limit, or at its end."""

    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[Future[list[str]], str] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(_LISTERS):
            thread = threading.Thread(target=self._work, name="kvtier-list", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    @property
    def count(self) -> int:
        return len(self._threads)

    def submit(self, path: str) -> Future[list[str]]:
        listing: Future[list[str]] = Future()
        self._wanted.put((listing, path))
        return listing

    def end(self) -> None:
        """Wait for what has been begun; what has not is still done, which is four listings at most."""
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            listing, path = wanted
            try:
                listing.set_result(list_dir_or_raise(path))
            except BaseException as error:  # whoever waits for it has to hear of it
                listing.set_exception(error)


class NamespaceScan:
    """Every chunk of a namespace, once; afterwards `other_bytes` is the size of whatever else lies there.

    Raises `OSError` on the way where a directory cannot be listed.
    """

    def __init__(self, namespace_dir: str) -> None:
        self._dir = namespace_dir
        self.other_bytes = 0

    def __iter__(self) -> Iterator[Chunk]:
        for _, chunks in self.shards():
            yield from chunks

    def shards(self) -> Iterator[tuple[int, Iterator[Chunk]]]:
        """The same, shard by shard: (its number, its chunks)."""
        there = list_dir_or_raise(self._dir)
        for name, names in _listings(self._dir, [name for name in there if name in _SHARDS]):
            chunks, strays = parse_names(names, name)
            yield int(name, 16), chunks
            self.other_bytes += sum(count_own(f"{self._dir}/{name}/{stray}") for stray in strays)
        for name in there:
            if name not in _SHARDS and name != DESCRIPTION:
                self.other_bytes += count_own(f"{self._dir}/{name}")


def count_namespace(namespace_dir: str) -> int:
    scan = NamespaceScan(namespace_dir)
    return sum(blocks for _, _, blocks in scan) * BLOCK + scan.other_bytes


def count_store(layout: Layout, skip: str | None = None) -> int:
    """Bytes of all files in the store's own directory: chunks by their names, anything else by its size; `skip` is a
    namespace that the caller counts. `count_foreign` has the rest of the root.

    Not counted: what the store keeps about itself (account, sessions, writes, namespace.json: some hundred bytes each),
    and temporaries, for which their session's reservation stands. Raises `OSError` where something of the store's own
    cannot be listed.
    """
    total = 0
    for name in list_dir_or_raise(layout.base):
        path = f"{layout.base}/{name}"
        if is_namespace_dir(name):
            total += count_namespace(path) if name != skip else 0
        elif path not in (layout.account, layout.writes, layout.sessions, layout.temp):
            total += count_own(path)
    return total


def count_foreign(layout: Layout) -> int:
    """Bytes of files under the root that are not the store's. What this user may not see is not counted: the root of a
    file system has a `lost+found`."""
    return sum(count_tree(f"{layout.root}/{name}") for name in list_dir(layout.root) if name != VERSION_DIR)


def count_tree(path: str) -> int:
    """Bytes of a file, or of all files below a directory of the same file system; symlinks are not followed, and what
    this user may not see is not counted."""
    try:
        return count_own(path)
    except OSError:
        return 0


def count_own(path: str) -> int:
    """The same of what lies in a directory of the store's own: raises `OSError` where it is not known what that is."""
    try:
        top = osio.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if not stat.S_ISDIR(top.st_mode):
        return top.st_size if stat.S_ISREG(top.st_mode) else 0
    total = 0
    pending = [path]
    while pending:
        directory = pending.pop()
        for name in list_dir(directory):
            child = f"{directory}/{name}"
            try:
                found = osio.lstat(child)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                if found.st_dev == top.st_dev:
                    pending.append(child)
            elif stat.S_ISREG(found.st_mode):
                total += found.st_size
    return total
