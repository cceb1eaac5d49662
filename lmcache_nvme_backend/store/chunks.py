"""The bytes of a namespace's chunks: in, out and gone, with the index kept in step with the disk."""

from __future__ import annotations

import threading

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.account import Account
from lmcache_nvme_backend.store.breaker import Breaker
from lmcache_nvme_backend.store.index import Entry, Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import Namespace
from lmcache_nvme_backend.store.reader import Reader
from lmcache_nvme_backend.store.removal import Removal
from lmcache_nvme_backend.store.results import GetResult, Hit, Miss, MissCause, PutResult
from lmcache_nvme_backend.store.settings import STORE_LOCK_WAIT_S
from lmcache_nvme_backend.store.watcher import Watcher
from lmcache_nvme_backend.store.writer import Writer


class Chunks:
    """Thread-safe; its I/O is the calling thread's, without a lock. Nothing is raised."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        account: Account,
        index: Index,
        watcher: Watcher,
        breaker: Breaker,
        reader: Reader,
        writer: Writer,
    ) -> None:
        self._layout = layout
        self._namespace = namespace
        self._account = account
        self._index = index
        self._watcher = watcher
        self._breaker = breaker
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._writing: set[ChunkKey] = set()

    def put(
        self, key: ChunkKey, view: memoryview, depth: int, parent: ChunkKey | None, tokens: int
    ) -> tuple[PutResult, int]:
        """(outcome, payload bytes written)."""
        if self._breaker.open:
            return PutResult.ASIDE, 0
        with self._lock:
            if key in self._writing:
                return PutResult.BUSY, 0
            self._writing.add(key)
        try:
            entry = self._index.get(key)
            if entry is not None:
                if self._file_is_there(key, entry) and self._index.use(key):
                    return PutResult.EXISTS, 0
                self._index.discard(key, entry)
            return self._writer.write(key, view, depth, parent, tokens)
        finally:
            with self._lock:
                self._writing.discard(key)

    def get(self, key: ChunkKey, into: memoryview) -> tuple[GetResult, int]:
        """(outcome, payload bytes read). A file that is not what it should be is removed."""
        if self._breaker.open:
            return Miss(MissCause.ASIDE), 0
        entry = self._index.get(key)
        if entry is None:
            self._watcher.follow((key,))
            entry = self._index.get(key)
        if entry is None:
            return Miss(MissCause.ABSENT), 0
        outcome = self._reader.read(key, entry, into)
        if isinstance(outcome.result, Hit):
            self._index.use(key)
        elif outcome.result.cause is MissCause.ABSENT:
            self._index.discard(key, entry)  # another process evicted it
        elif outcome.result.cause.corrupt:
            self._index.discard(key, entry)
            if not self.remove_file(key, entry, outcome.inode) and outcome.inode is not None:
                self._writer.remove_later(self._path(key, entry), entry.nbytes, outcome.inode)
        return outcome.result, outcome.nbytes

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk, pinned or not. False where it was not there, or where it cannot be removed now."""
        entry = self._index.discard(key)
        if entry is None:
            return False
        removed = self.remove_file(key, entry)
        if not removed and self._file_is_there(key, entry):
            self._index.add(key, entry.depth, entry.blocks, entry.parent, stored=False)
        return removed

    def remove_file(self, key: ChunkKey, entry: Entry, inode: int | None = None) -> bool:
        """Remove a chunk's file, if it is still this inode where one is given: a newer file may be good."""
        path = self._path(key, entry)
        try:
            with Removal() as removal, self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                if inode is not None and osio.lstat(path).st_ino != inode:
                    return False
                removed = removal.remove(path)
                if removed:
                    ledger.free(entry.nbytes)
                again = self._index.get(key)
                if removed and again is not None and (again.depth, again.blocks) == (entry.depth, entry.blocks):
                    self._index.discard(key, again)  # a put found the file before it went
                return bool(removed)
        except OSError:
            return False

    def _file_is_there(self, key: ChunkKey, entry: Entry) -> bool:
        return not recovery.is_gone(self._path(key, entry))

    def _path(self, key: ChunkKey, entry: Entry) -> str:
        return self._layout.chunk(self._namespace.digest, key, entry.depth, entry.blocks)
