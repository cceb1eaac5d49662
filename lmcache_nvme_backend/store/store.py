"""The chunk store: keys and bytes in, bytes out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_nvme_backend.store import opening, osio, recovery
from lmcache_nvme_backend.store import session as sessions
from lmcache_nvme_backend.store.account import Account, Ledger, LockTimeout
from lmcache_nvme_backend.store.admission import Admission
from lmcache_nvme_backend.store.breaker import Breaker
from lmcache_nvme_backend.store.census import Census
from lmcache_nvme_backend.store.density import HitDensity
from lmcache_nvme_backend.store.direct_io import Transfer, as_bytes
from lmcache_nvme_backend.store.evictor import Evictor
from lmcache_nvme_backend.store.format import MAX_UINT32
from lmcache_nvme_backend.store.index import Entry, Index
from lmcache_nvme_backend.store.keys import KEY_BYTES, ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import Namespace, write_description
from lmcache_nvme_backend.store.policy import EvictionPolicy
from lmcache_nvme_backend.store.probe import DiskProbe
from lmcache_nvme_backend.store.reader import Reader
from lmcache_nvme_backend.store.removal import Removal, remove_file
from lmcache_nvme_backend.store.results import GetResult, Hit, Miss, MissCause, PutResult, StoreStats, Usage
from lmcache_nvme_backend.store.settings import CLOSE_WAIT_S, STORE_LOCK_WAIT_S, StoreSettings
from lmcache_nvme_backend.store.upkeep import Upkeep
from lmcache_nvme_backend.store.watcher import Watcher
from lmcache_nvme_backend.store.write_budget import WriteBudget
from lmcache_nvme_backend.store.writer import Writer


class ChunkStore:
    """One namespace under one root, open in this process. Other stores, here or in other processes, may have the same
    root and the same namespace open at the same time.

    Every method may be called from any thread. `put` and `get` do their I/O in the calling thread, without a lock.
    Nothing raises but `open` (`ConfigError`) and wrong arguments (`ValueError`, `TypeError`).
    """

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        settings: StoreSettings,
        policy: EvictionPolicy,
    ) -> None:
        """Use `open`."""
        self._layout = layout
        self._settings = settings
        self.namespace = namespace
        self.warnings: list[str] = []
        self.stats = StoreStats()
        self._stats_lock = threading.Lock()
        self._index = Index(policy)
        self._session = sessions.Session(layout, namespace.raw_digest, settings.quota_bytes)
        self._census = Census(layout, namespace, self._session, self._index)
        self._account = Account(layout.account, self._census.recount)
        self._directory = layout.namespace(namespace.digest)
        self._watcher = Watcher(layout, self._session, namespace.digest, self._index)
        self._budget = WriteBudget(layout.writes, settings.write_budget_bytes_per_day)
        self._admission = Admission(settings, self._account, self._index, self._budget)
        self._evictor = Evictor(layout, self._account, namespace.digest, self._index, settings, self.stats)
        self._calls = threading.Condition()
        self._in_flight = 0
        self._closed = False
        self._writing: set[ChunkKey] = set()
        self._breaker: Breaker
        self._transfer: Transfer
        self._reader: Reader
        self._writer: Writer
        self._upkeep: Upkeep | None = None

    # --- life

    @classmethod
    def open(
        cls,
        root: Path,
        namespace: Namespace,
        settings: StoreSettings,
        policy: EvictionPolicy | None = None,
    ) -> ChunkStore:
        """Open `namespace` under `root`, an existing directory; whatever chunks lie there are found.

        Raises `ConfigError` for what a person can put right: the path, a file system without direct I/O where that is
        demanded, or the root's lock held for longer than `settings.lock_wait_s`. Odd things that work are sentences in
        `warnings`.
        """
        layout = opening.check_root(root, settings)
        policy = policy or HitDensity()
        try:
            return cls._open(layout, namespace, settings, policy)
        except OSError as error:
            if error.errno in osio.FULL and recovery.give_way(layout):
                try:
                    return cls._open(layout, namespace, settings, policy, recount=True)
                except OSError as again:
                    error = again
            raise opening.disk_refusal(layout, error) from None

    @classmethod
    def _open(
        cls,
        layout: Layout,
        namespace: Namespace,
        settings: StoreSettings,
        policy: EvictionPolicy,
        recount: bool = False,
    ) -> ChunkStore:
        store = cls(layout, namespace, settings, policy)
        try:
            store._start(recount)
        except LockTimeout:
            holder = store._account.holder()
            store._abandon()
            raise opening.lock_refusal(layout, settings, holder) from None
        except BaseException:
            store._abandon()
            raise
        return store

    def _start(self, recount: bool) -> None:
        layout, namespace, settings = self._layout, self.namespace, self._settings
        if not self._census.read_hint():
            self.stats.snapshots_ignored += 1
        if self._index.ghosts is not None:
            self._index.ghosts.read(self._directory, namespace.raw_digest)
        with self._account.locked(settings.lock_wait_s, force_recount=recount) as ledger:
            self._session.ensure()
            sessions.sweep(layout, ledger)
            self._watcher.begin()
            osio.make_dir_in_place_of_file(self._directory)
            self._census.begin(ledger)
            probe_path, description_path = self._session.temporary(), self._session.temporary()
        if self._census.unlisted:
            self._watcher.doubt()
        try:
            write_description(self._directory, namespace, description_path)
        except OSError as error:
            self.warnings.append(f"nvme.path: {self._directory}/namespace.json cannot be written: {error.strerror}.")
        self._transfer = opening.choose_transfer(layout, settings, probe_path, self.warnings)
        self._census.finish()
        probe = DiskProbe(layout, namespace.digest, self._account, self._session, self._index, self._transfer)
        self._breaker = Breaker(layout.root, probe)
        self._reader = Reader(layout, namespace, self._transfer, self._breaker)
        self._writer = Writer(
            layout, namespace, settings, self._account, self._session, self._index, self._evictor, self._transfer,
            self._breaker, self._budget,
        )  # fmt: skip
        for path in (probe_path, description_path):  # gone, unless their removal failed
            self._writer.abandon(path, 0)
        for key, depth, blocks in self._census.doubles:
            self._remove_file(key, Entry(blocks, depth, None))
        self._upkeep = Upkeep(
            layout, namespace, settings, self._account, self._session, self._index, self._evictor, self._writer,
            self._breaker,
        )  # fmt: skip
        self._upkeep.start(counted=not self._census.unlisted, ranked=self._census.unlisted and self._census.exact)
        opening.warn_of_other_files(layout, settings, self._census.foreign_bytes, self.warnings)

    def _abandon(self) -> None:
        """Undo a failed open."""
        self._closed = True
        osio.unlink_quietly(self._session.path)
        self._session.close()
        self._account.close()

    def close(self) -> None:
        """Finish the calls in flight and leave the root. Later calls find nothing and store nothing. Idempotent."""
        deadline = time.monotonic() + CLOSE_WAIT_S
        with self._calls:
            if self._closed:
                return
            self._closed = True
            while self._in_flight and (left := deadline - time.monotonic()) > 0:
                self._calls.wait(left)
        if self._upkeep is not None:
            self._upkeep.stop()
        try:
            with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                remove_file(self._session.path)
                ledger.cancel(self._session.reserved)
        except OSError:
            pass  # an unlocked session file is swept by the next store that looks
        self._session.close()
        self._account.close()

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self) -> bool:
        with self._calls:
            if self._closed:
                return False
            self._in_flight += 1
            return True

    def _leave(self) -> None:
        with self._calls:
            self._in_flight -= 1
            if self._closed:
                self._calls.notify_all()

    # --- lookups

    def match(
        self,
        keys: Sequence[ChunkKey],
        *,
        pin: bool = False,
        again: bool = False,
        depths: Sequence[int] | None = None,
    ) -> int:
        """How many leading keys are present. `keys` is a prefix, head first: all that a request could use, since
        the policy learns from what is missing, too. `again`: the same request has asked before. `depths`: as given to
        `put`, where they are not the positions in `keys`; with them what another process has stored is found at once
        instead of by listing a directory.

        Refreshes the recency of those found, so that the head ends as the most recent, and pins each once more where
        `pin`. Present means that the file was there when this process last knew; its content is checked by `get`.
        """
        if self._closed or self._breaker.open:
            return 0
        self._watcher.follow(keys, depths)
        return self._index.use_prefix(keys, pin, again)

    def contains(self, key: ChunkKey, *, pin: bool = False, depth: int = 0) -> bool:
        """Whether one chunk, of a prefix that a request has asked for, is present: refreshes and pins like `match`.

        For asking before a `put`: what another process has stored is looked for by its likely name at this depth and no
        further, since a wrong no costs one write that finds it there.
        """
        if self._closed or self._breaker.open:
            return False
        self._watcher.follow((key,), (depth,), listing=False)
        return self._index.use(key, pin)

    def known(self, key: ChunkKey, *, look: bool = False, depth: int = 0) -> bool:
        """Whether a chunk is present, without a use of it. From memory alone, so that it never waits for the disk;
        `look`: also where another store has put it, which may wait."""
        if self._closed or self._breaker.open:
            return False
        if look and key not in self._index:
            self._watcher.follow((key,), (depth,))
        return key in self._index

    def pin(self, key: ChunkKey) -> bool:
        """Protect a present chunk from eviction by this store until as many `unpin`. False where it is not present."""
        return not self._closed and not self._breaker.open and self._index.pin(key)

    def unpin(self, key: ChunkKey) -> bool:
        """Take one pin away. False where there was none."""
        return self._index.unpin(key)

    def refusal(self, key: ChunkKey, nbytes: int = 0) -> PutResult | None:
        """Why a chunk of `nbytes` that is not present is not to be stored now, by `settings.admission` and the write
        budget: to be asked before its bytes are brought here, in the order of the prefix. None where `put` may be
        called.

        What follows a refused chunk in its prefix is of no use, either. `put` itself goes by the budget alone.
        """
        return PutResult.CLOSED if self._closed else self._admission.refusal(key, nbytes)

    # --- bytes

    def put(
        self, key: ChunkKey, payload: memoryview, *, depth: int, parent: ChunkKey | None = None, tokens: int = 0
    ) -> PutResult:
        """Store exactly the bytes of `payload` under `key`.

        `depth` is the number of chunks before this one in its prefix, `parent` the key of the one right before it;
        `tokens` comes back with a hit. `payload` is contiguous and stays unchanged until this returns. Any address and
        length work; memory aligned to 4096 bytes and writable is written without a copy. Its length needs no rounding:
        a last, partial block is padded from memory of the store's own.
        """
        _check_arguments(key, depth, tokens)
        view = as_bytes(payload)
        result, written = PutResult.CLOSED, 0
        if self._enter():
            try:
                result, written = self._put(key, view, depth, parent, tokens)
            finally:
                self._leave()
        with self._stats_lock:
            self.stats.puts[result] += 1
            self.stats.bytes_written += written
        return result

    def _put(
        self, key: ChunkKey, view: memoryview, depth: int, parent: ChunkKey | None, tokens: int
    ) -> tuple[PutResult, int]:
        if self._breaker.open:
            return PutResult.ASIDE, 0
        with self._calls:
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
            with self._calls:
                self._writing.discard(key)

    def get(self, key: ChunkKey, into: memoryview) -> GetResult:
        """Read a chunk to the start of `into`, which is writable and at least as long as the payload given to `put`;
        nothing behind the payload's end is touched. After a miss the content of `into` is undefined.

        A file that is not what it should be is removed.
        """
        view = as_bytes(into)
        if view.readonly:
            raise ValueError("get needs a writable buffer")
        result: GetResult = Miss(MissCause.CLOSED)
        nbytes = 0
        if self._enter():
            try:
                result, nbytes = self._get(key, view)
            finally:
                self._leave()
        with self._stats_lock:
            self.stats.bytes_read += nbytes
            if isinstance(result, Hit):
                self.stats.hits += 1
            else:
                self.stats.misses[result.cause] += 1
        return result

    def _get(self, key: ChunkKey, into: memoryview) -> tuple[GetResult, int]:
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
            if not self._remove_file(key, entry, outcome.inode) and outcome.inode is not None:
                path = self._layout.chunk(self.namespace.digest, key, entry.depth, entry.blocks)
                self._writer.remove_later(path, entry.nbytes, outcome.inode)
        return outcome.result, outcome.nbytes

    def _file_is_there(self, key: ChunkKey, entry: Entry) -> bool:
        path = self._layout.chunk(self.namespace.digest, key, entry.depth, entry.blocks)
        return not recovery.is_gone(path)

    def _remove_file(self, key: ChunkKey, entry: Entry, inode: int | None = None) -> bool:
        """Remove a chunk's file, if it is still this inode where one is given: a newer file may be good."""
        path = self._layout.chunk(self.namespace.digest, key, entry.depth, entry.blocks)
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

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk, pinned or not. False where it was not there, or where it cannot be removed now."""
        if not self._enter():
            return False
        try:
            entry = self._index.discard(key)
            if entry is None:
                return False
            removed = self._remove_file(key, entry)
            if not removed and self._file_is_there(key, entry):
                self._index.add(key, entry.depth, entry.blocks, entry.parent, stored=False)
            return removed
        finally:
            self._leave()

    def clear(self) -> int:
        """Remove every chunk of this namespace, pinned or not; returns how many there were."""
        return sum(self.remove(key) for key in self._index.all_keys())

    @property
    def directory(self) -> str:
        """This namespace's directory."""
        return self._directory

    @property
    def stands_aside(self) -> bool:
        """Whether the disk fails, so that every lookup is a miss and nothing is stored until it works again."""
        return self._breaker.open

    @property
    def direct_io(self) -> bool:
        """Whether chunks bypass the page cache."""
        return self._transfer.direct

    def usage(self) -> Usage:
        """Bytes used and promised under the whole root, as of a moment ago, and this namespace's part."""
        ledger = (None if self._closed else self._account.peek()) or Ledger(0, 0)
        return Usage(ledger.used, ledger.reserved, self._settings.quota_bytes, self._index.nbytes, len(self._index))


def _check_arguments(key: ChunkKey, depth: int, tokens: int) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes, made by digest_fields")
    if not 0 <= depth <= MAX_UINT32 or not 0 <= tokens <= MAX_UINT32:
        raise ValueError("depth and tokens are between 0 and 2**32 - 1")
