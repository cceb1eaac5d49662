"""What a store does in the background: recency to and from disk, the quota's rest, what is owed or was deleted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from lmcache_nvme_backend.store import ghosts, osio, recovery, snapshot
from lmcache_nvme_backend.store.account import Account
from lmcache_nvme_backend.store.breaker import Breaker
from lmcache_nvme_backend.store.evictor import Evictor
from lmcache_nvme_backend.store.format import MAX_UINT32
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, Namespace
from lmcache_nvme_backend.store.session import Session
from lmcache_nvme_backend.store.settings import (
    CLOSE_WAIT_S,
    GHOSTS_INTERVAL_S,
    GHOSTS_SHARE,
    RANK_AT_OPEN,
    SNAPSHOT_FROM,
    SNAPSHOT_INTERVAL_S,
    STORE_LOCK_WAIT_S,
    TOUCHES_PER_UPKEEP,
    UPKEEP_INTERVAL_S,
    StoreSettings,
)
from lmcache_nvme_backend.store.writer import Writer

# namespace.json's time says when the namespace was last used; it decides between namespaces, so minutes are enough.
_USE_INTERVAL_S: Final = 60.0

logger = logging.getLogger("vllm.lmcache_nvme_backend.store")


class Upkeep:
    """One thread a store. It never raises: what fails is tried again at the next interval."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        settings: StoreSettings,
        account: Account,
        session: Session,
        index: Index,
        evictor: Evictor,
        writer: Writer,
        breaker: Breaker,
    ) -> None:
        self._layout = layout
        self._digest = namespace.digest
        self._raw_digest = namespace.raw_digest
        self._settings = settings
        self._account = account
        self._session = session
        self._index = index
        self._evictor = evictor
        self._writer = writer
        self._breaker = breaker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvme-store-upkeep", daemon=True)
        self._ranked = False
        self._counted = True
        self._used_at = float("-inf")
        self._snapshot_at = self._ghosts_at = time.monotonic()
        self._snapshot_of = (0, 0, 0)
        self._said = False

    def start(self, counted: bool = True, ranked: bool = False) -> None:
        """Rank the index and bring the root below the quota, here if that is quick, else in the thread.

        Not `counted`: the index comes from a snapshot, and the thread lists the directory. `ranked`: its
        order is known.
        """
        self._counted, self._ranked = counted, ranked
        if counted and len(self._index) <= RANK_AT_OPEN:
            self._rank()
            self._trim()
        self._mark_use()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after one last write of what is not on disk yet. A disk that hangs holds nobody up for longer
        than CLOSE_WAIT_S."""
        self._stopping.set()
        self._thread.join(CLOSE_WAIT_S)
        if not self._thread.is_alive() and not self._breaker.open:
            self._flush(limit=len(self._index))
            self._mark_use()
            self._write_ghosts()
            self._write_snapshot(closed=self._ranked)

    def _run(self) -> None:
        self._guarded(self._begin)
        while not self._stopping.wait(UPKEEP_INTERVAL_S):
            self._guarded(self._turn)

    def _guarded(self, work: Callable[[], None]) -> None:
        """What the file system refuses is handled where it happens. Anything else is a bug, or memory that ran out: a
        store without upkeep would slowly stop evicting, so the thread goes on, and says it once."""
        try:
            work()
        except Exception:
            if not self._said:
                logger.exception("lmcache_nvme_backend: upkeep of %s failed; it goes on", self._digest)
            self._said = True

    def _begin(self) -> None:
        self._count()
        if not self._ranked:
            self._rank()
        self._trim()

    def _turn(self) -> None:
        self._breaker.try_again()
        if self._breaker.open:
            return
        self._count()
        self._flush(TOUCHES_PER_UPKEEP)
        self._writer.settle()
        self._writer.drop_written_pages()
        self._restore()
        self._trim()
        if time.monotonic() - self._used_at > _USE_INTERVAL_S:
            self._mark_use()
        if time.monotonic() - self._ghosts_at > GHOSTS_INTERVAL_S:
            self._write_ghosts()
        if time.monotonic() - self._snapshot_at > SNAPSHOT_INTERVAL_S and self._index.mark() != self._snapshot_of:
            self._write_snapshot(closed=False)

    def _count(self) -> None:
        """List the directory behind an index that came from a snapshot."""
        if not self._counted:
            try:
                with self._account.locked(STORE_LOCK_WAIT_S, force_recount=True):
                    self._counted = True
            except OSError:
                pass

    def _write_ghosts(self) -> None:
        self._ghosts_at = time.monotonic()
        table = self._index.ghosts
        if table is None or not table.changed or self._settings.quota_bytes < GHOSTS_SHARE * ghosts.FILE_BYTES:
            return
        path = f"{self._layout.namespace(self._digest)}/{ghosts.FILE}"
        try:
            self._writer.replace(path, table.encode(self._raw_digest), ghosts.FILE_BYTES)
        except OSError:
            pass  # a hint

    def _write_snapshot(self, closed: bool) -> None:
        self._snapshot_at, self._snapshot_of = time.monotonic(), self._index.mark()
        path = f"{self._layout.namespace(self._digest)}/{snapshot.FILE}"
        try:
            if len(self._index) < SNAPSHOT_FROM:
                self._writer.remove(path)  # an old one would name what is gone
                return
            found = self._index.snapshot(closed)
            self._writer.replace(path, snapshot.encode(found, self._raw_digest), snapshot.size_of(len(found)))
        except OSError:
            pass  # the next start lists the directory

    def _rank(self) -> None:
        """Read when each chunk was last used, and order the index by it: of those used together the deepest first."""
        by_second: dict[int, list[ChunkKey]] = {}
        ranks: dict[ChunkKey, int] = {}
        seconds: dict[int, int] = {}
        for key in self._index.all_keys():
            entry = self._index.get(key)
            if self._stopping.is_set():
                return
            if entry is not None:
                path = self._layout.chunk(self._digest, key, entry.depth, entry.blocks)
                used_ns = recovery.file_time(path) or 0
                if not entry.used_s:
                    entry.used_s = seconds.setdefault(used_ns // 1_000_000_000, used_ns // 1_000_000_000)
                ranks[key] = (used_ns << 32) + MAX_UINT32 - entry.depth
                by_second.setdefault(used_ns // 1_000_000_000, []).append(key)

        def coldest_first() -> Iterator[ChunkKey]:
            # Second by second: one sort of a million keys would hold the interpreter for as long as it takes.
            for second in sorted(by_second):
                yield from sorted(by_second[second], key=ranks.__getitem__)

        self._index.rank(list(coldest_first()))
        self._ranked = True

    def _flush(self, limit: int) -> None:
        outside: dict[int, bool] = {}
        for key, entry, ns in self._index.take_times(limit):
            path = self._layout.chunk(self._digest, key, entry.depth, entry.blocks)
            try:
                if key[0] not in outside:
                    outside[key[0]] = recovery.leads_outside(path)
                if not outside[key[0]]:
                    osio.utime(path, ns)
            except OSError:
                pass  # evicted by another process, or a disk that fails: recency is a hint

    def _mark_use(self) -> None:
        self._used_at = time.monotonic()
        path = f"{self._layout.namespace(self._digest)}/{DESCRIPTION}"
        try:
            if not recovery.leads_outside(path):
                osio.utime(path, time.time_ns())
        except OSError:
            pass

    def _restore(self) -> None:
        """Put this session's file back where somebody deleted it: without it others take this store for dead."""
        try:
            osio.lstat(self._session.path)
        except FileNotFoundError:
            try:
                with self._account.locked(STORE_LOCK_WAIT_S, force_recount=True):
                    pass
            except OSError:
                pass
        except OSError:
            pass

    def _trim(self) -> None:
        """A quota that was lowered, or files that somebody put here."""
        ledger = self._account.peek()
        if ledger is not None and ledger.used + ledger.reserved > self._settings.quota_bytes:
            try:
                self._evictor.make_room(0, ())
            except OSError:
                pass
