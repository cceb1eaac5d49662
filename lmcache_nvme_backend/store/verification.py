"""Reading every chunk of a store and checking it as a load would, gently: one chunk at a time, past the page cache."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import msgspec

from lmcache_nvme_backend.store import osio, recovery, snapshot
from lmcache_nvme_backend.store.direct_io import Pages, Pool, Transfer
from lmcache_nvme_backend.store.format import BLOCK, Header, parse_header, parse_names
from lmcache_nvme_backend.store.guest import Guest
from lmcache_nvme_backend.store.index import Entry
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.namespace import DESCRIPTION, Namespace, NamespaceDigest, read_description
from lmcache_nvme_backend.store.reader import Reader
from lmcache_nvme_backend.store.recovery import Chunk
from lmcache_nvme_backend.store.removal import HINTS
from lmcache_nvme_backend.store.results import Hit, Miss, MissCause

# A chunk of a 256-token context is megabytes. What claims to be larger than this is not read, but reported.
LARGEST: Final = 1 << 30
_GROW: Final = 1 << 20


class Fault(msgspec.Struct):
    """A file that is not what it should be, why, and whether it has been removed."""

    path: str
    cause: str
    nbytes: int
    removed: bool = False


class Verification(msgspec.Struct):
    """What reading everything found."""

    chunks: int = 0  # good ones
    nbytes: int = 0  # read and checked, file sizes
    bad: list[Fault] = []  # damaged: a load of one is a miss
    unreadable: list[Fault] = []  # the disk or this user's rights, not the content
    gone: int = 0  # evicted or removed by an engine before their turn
    strays: list[str] = []  # files that are no chunks; nobody reads them
    direct_io: bool = False

    @property
    def sound(self) -> bool:
        return not self.bad and not self.unreadable


def size(tree: StoreTree) -> tuple[int, int]:
    """(chunks, bytes) that there are to read, by their names."""
    chunks = nbytes = 0
    for name in tree.names():
        for _, _, blocks in recovery.namespace_chunks(tree.directory(name)):
            chunks += 1
            nbytes += blocks * BLOCK
    return chunks, nbytes


def verify(tree: StoreTree, remove_bad: bool, on_progress: Callable[[int], None] = lambda nbytes: None) -> Verification:
    """Check every namespace of a store. `on_progress` is told the size of each file that has been dealt with.

    Raises `OSError` where something cannot be listed, and `ConfigError` where bad files cannot be removed.
    """
    with ExitStack() as stack:
        guest = stack.enter_context(Guest(tree.layout)) if remove_bad else None
        return _Verifier(tree, guest, on_progress).run()


class _Verifier:
    def __init__(self, tree: StoreTree, guest: Guest | None, on_progress: Callable[[int], None]) -> None:
        self._tree = tree
        self._guest = guest
        self._on_progress = on_progress
        self._found = Verification()
        self._buffer = memoryview(mmap.mmap(-1, _GROW))
        self._transfer = Transfer(False, Pool())

    def run(self) -> Verification:
        names = self._tree.names()
        self._transfer = Transfer(any(self._reads_directly(name) for name in names), Pool())
        self._found.direct_io = self._transfer.direct
        for name in names:
            self._check_description(name)
            self._check_snapshot(name)
            reader = Reader(self._tree.layout, NamespaceDigest(bytes.fromhex(name)), self._transfer)
            for key, depth, blocks in self._chunks(name):
                self._check(reader, name, key, depth, blocks)
        return self._found

    def _reads_directly(self, name: str) -> bool:
        """Whether the file system takes a direct read of a namespace's first chunk."""
        for key, depth, blocks in recovery.namespace_chunks(self._tree.directory(name)):
            try:
                return self._header(self._tree.layout.chunk(name, key, depth, blocks), osio.O_DIRECT) is not None
            except OSError:
                return False
        return False

    def _header(self, path: str, flags: int) -> memoryview | None:
        """A file's first block."""
        fd = osio.open(path, os.O_RDONLY | flags)
        try:
            header = Pages().header
            return header if osio.read_fully(fd, [header]) == BLOCK else None
        finally:
            osio.close_quietly(fd)

    def _chunks(self, name: str) -> Iterator[Chunk]:
        """Every chunk of a namespace; what is none goes to the strays."""
        directory = self._tree.directory(name)
        for shard in sorted(recovery.list_dir_or_raise(directory)):
            path = f"{directory}/{shard}"
            if shard in recovery.SHARDS:
                chunks, strays = parse_names(recovery.list_dir_or_raise(path), shard)
                self._found.strays += [f"{path}/{stray}" for stray in strays]
                if not _is_dir(path):
                    self._found.strays.append(path)
                yield from chunks
            elif shard not in (DESCRIPTION, *HINTS):
                self._found.strays.append(path)

    def _check_description(self, name: str) -> None:
        """namespace.json: absent is fine, another content than its directory's name says is not."""
        directory = self._tree.directory(name)
        path = f"{directory}/{DESCRIPTION}"
        if recovery.file_time(path) is None:
            return
        description = read_description(directory)
        try:
            good = description is not None and Namespace(description.facts).digest == name
        except TypeError:
            good = False
        if not good:
            removed = self._guest is not None and osio.unlink_quietly(path)
            self._found.bad.append(Fault(path, "not the description of this namespace", 0, removed))

    def _check_snapshot(self, name: str) -> None:
        """The index's snapshot: absent is fine; a bad one would be ignored, and is of no use."""
        directory = self._tree.directory(name)
        path = f"{directory}/{snapshot.FILE}"
        try:
            snapshot.read(directory, bytes.fromhex(name))
        except (OSError, ValueError) as error:
            removed = self._guest is not None and self._guest.remove_own(path)
            self._found.bad.append(Fault(path, f"not a snapshot of this namespace: {error}", 0, removed))

    def _check(self, reader: Reader, name: str, key: ChunkKey, depth: int, blocks: int) -> None:
        entry = Entry(blocks, depth, None)
        path = self._tree.layout.chunk(name, key, depth, blocks)
        found = self._found
        need = entry.nbytes if _size(path) == entry.nbytes else BLOCK
        outcome = reader.read(key, entry, self._room(min(need, LARGEST)))
        if isinstance(outcome.result, Miss) and outcome.result.cause is MissCause.TOO_LARGE:
            need = self._raw_bytes(path, name, key, depth, blocks)
            if need <= LARGEST:
                outcome = reader.read(key, entry, self._room(need))
        result = outcome.result
        if isinstance(result, Hit):
            found.chunks += 1
            found.nbytes += entry.nbytes
        elif result.cause is MissCause.ABSENT:
            found.gone += 1
        elif result.cause.corrupt and result.cause is not MissCause.UNREADABLE:
            removed = self._guest is not None and self._remove(self._guest, path, entry.nbytes, outcome.inode)
            found.bad.append(Fault(path, result.cause.value, entry.nbytes, removed))
        else:
            found.unreadable.append(Fault(path, result.cause.value, entry.nbytes))
        self._on_progress(entry.nbytes)

    def _room(self, nbytes: int) -> memoryview:
        """A buffer of at least so much, the same one where that is large enough."""
        if len(self._buffer) < nbytes:
            self._buffer = memoryview(mmap.mmap(-1, -(-nbytes // _GROW) * _GROW))
        return self._buffer

    def _raw_bytes(self, path: str, name: str, key: ChunkKey, depth: int, blocks: int) -> int:
        """What a chunk's header says of its size in memory; more than `LARGEST` where it cannot be told."""
        try:
            block = self._header(path, self._transfer.flags)
        except OSError:
            block = None
        header = parse_header(block, key, bytes.fromhex(name), depth, blocks) if block is not None else None
        return header.raw_bytes if isinstance(header, Header) else LARGEST + 1

    @staticmethod
    def _remove(guest: Guest, path: str, nbytes: int, inode: int | None) -> bool:
        """Remove a bad file, unless a newer one has taken its place."""
        return guest.remove([(path, nbytes)], lambda _, found: found.st_ino == inode).chunks == 1


def _size(path: str) -> int:
    try:
        return osio.lstat(path).st_size
    except OSError:
        return -1


def _is_dir(path: str) -> bool:
    try:
        return stat.S_ISDIR(osio.lstat(path).st_mode)
    except OSError:
        return False
