"""Making room: whose chunks go, and in which order.

First come namespaces that no live session has open, the one unused for longest in front: a model that nobody runs must
not hold the quota for good. Then, where this namespace holds less than its fair share (quota / live namespaces) and
another live one more, that one's oldest chunks: a new engine must get its part of a root that another one has filled.
Then this namespace's own chunks, in the order of its policy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Container
from typing import Final

import msgspec

from lmcache_nvme_backend.store import recovery, session
from lmcache_nvme_backend.store.account import Account, Ledger
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.index import Entry, Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, is_namespace_dir
from lmcache_nvme_backend.store.removal import Removal, remove_empty_namespace, remove_hints
from lmcache_nvme_backend.store.results import StoreStats
from lmcache_nvme_backend.store.settings import (
    EVICT_BATCH,
    EVICT_WAIT_S,
    STORE_LOCK_WAIT_S,
    UPKEEP_INTERVAL_S,
    StoreSettings,
)

# Another namespace's chunks are ordered by the times of their files up to this many (13 us each), above by depth alone:
# the wait for the list is part of a put.
_TIMES_LIMIT: Final = 20_000
# How long a list of another namespace's chunks is good: a live one goes on using them.
_LIST_AGE_S: Final = 30.0
# Counting the directory again, when nothing is left to evict and it is still too full, at most this often.
_RECOUNT_INTERVAL_S: Final = 60.0


# A namespace whose files could not be removed is left alone for this long.
_STUCK_S: Final = 60.0


class _Foreign(msgspec.Struct):
    """Chunks of another namespace, the one to evict first in front."""

    digest: str
    chunks: deque[tuple[str, int]]  # path, bytes
    made_at: float


class Evictor:
    """One a store. `make_room` and `free` may be called from any thread; they work one at a time."""

    def __init__(
        self, layout: Layout, account: Account, digest: str, index: Index, settings: StoreSettings, stats: StoreStats
    ) -> None:
        self._layout = layout
        self._account = account
        self._digest = digest
        self._index = index
        self._settings = settings
        self._stats = stats
        self._mutex = threading.Lock()
        self._foreign: dict[str, _Foreign] = {}
        self._stuck: dict[str, float] = {}  # namespace -> since when
        self._recounted_at = float("-inf")

    def make_room(self, nbytes: int, spare: Container[ChunkKey]) -> bool:
        """Evict until `nbytes` more fit into the quota. False where they cannot, or not within EVICT_WAIT_S.

        `spare` holds chunks that may not go: without its predecessors the new chunk would be worthless.
        Raises `OSError` as `Account.locked` does.
        """
        with Removal() as removal:
            if not self._mutex.acquire(timeout=EVICT_WAIT_S):
                return False
            try:
                return self._make_room(nbytes, spare, removal)
            finally:
                self._mutex.release()

    def _make_room(self, nbytes: int, spare: Container[ChunkKey], removal: Removal) -> bool:
        quota = self._settings.quota_bytes
        deadline = time.monotonic() + EVICT_WAIT_S
        while True:
            source = self._source(nbytes)
            with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                missing = ledger.used + ledger.reserved + nbytes - quota
                if missing <= 0:
                    return True
                progress = session.sweep(self._layout, ledger) > 0
                if not progress:
                    progress = self._evict(source, missing, spare, ledger, removal)
                if ledger.used + ledger.reserved + nbytes <= quota:
                    return True
            removal.finish()
            if time.monotonic() > deadline:
                return False
            if not progress and not self._skip(source) and not self._recount():
                return False

    def free(self, nbytes: int, spare: Container[ChunkKey]) -> int:
        """Evict chunks of `nbytes` in all, whatever the quota says: the disk is full. Returns the bytes freed."""
        freed = 0
        deadline = time.monotonic() + EVICT_WAIT_S
        with Removal() as removal, self._mutex:
            while freed < nbytes and time.monotonic() < deadline:
                source = self._source(nbytes)
                with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
                    before = ledger.used
                    progress = self._evict(source, nbytes - freed, spare, ledger, removal)
                    freed += before - ledger.used
                removal.finish()
                if not progress and not self._skip(source):
                    break
        return freed

    def _skip(self, source: _Foreign | None) -> bool:
        """Whether there may be another source than this one, which gave nothing."""
        if source is not None:
            self._stuck[source.digest] = time.monotonic()
        return source is not None

    # --- whose

    def _source(self, nbytes: int) -> _Foreign | None:
        """The foreign namespace to take from, or None for this store's own. Lists directories: call it unlocked."""
        try:
            peers = session.live_peers(self._layout)
        except OSError:
            return None
        now = time.monotonic()
        self._stuck = {digest: since for digest, since in self._stuck.items() if now - since < _STUCK_S}
        held: dict[str, int] = {}
        for peer in peers:
            held[peer.namespace] = max(held.get(peer.namespace, 0), peer.namespace_bytes)
        dead = [
            name
            for name in recovery.list_dir(self._layout.base)
            if is_namespace_dir(name) and name not in held and name != self._digest and name not in self._stuck
        ]
        for digest in sorted(dead, key=self._last_use):
            foreign = self._list(digest)
            if foreign.chunks:
                return foreign
            self._remove_empty(digest)
        held.pop(self._digest, None)
        share = self._settings.quota_bytes // (len(held) + 1)
        if held and self._index.nbytes + nbytes <= share:
            largest = max(held, key=lambda digest: held[digest])
            if held[largest] > share and largest not in self._stuck:
                foreign = self._list(largest)
                if foreign.chunks:
                    return foreign
        return None

    def _last_use(self, digest: str) -> int:
        directory = self._layout.namespace(digest)
        return recovery.file_time(f"{directory}/{DESCRIPTION}") or recovery.file_time(directory) or 0

    def _list(self, digest: str) -> _Foreign:
        known = self._foreign.get(digest)
        now = time.monotonic()
        if known is not None and now - known.made_at < _LIST_AGE_S:
            return known
        chunks = list(recovery.namespace_chunks(self._layout.namespace(digest)))
        paths = [self._layout.chunk(digest, *chunk) for chunk in chunks]
        with_times = len(chunks) <= _TIMES_LIMIT
        order = sorted(
            (_period(path) if with_times else 0, -depth, path, blocks * BLOCK)
            for path, (_, depth, blocks) in zip(paths, chunks)
        )
        foreign = _Foreign(digest, deque((path, size) for _, _, path, size in order), now)
        self._foreign[digest] = foreign
        return foreign

    def _remove_empty(self, digest: str) -> None:
        """Take away the directories of a namespace that has no chunk left. Anything unknown in them keeps them."""
        self._foreign.pop(digest, None)
        directory = self._layout.namespace(digest)
        with self._account.locked(STORE_LOCK_WAIT_S) as ledger:
            if any(peer.namespace == digest for peer in session.live_peers(self._layout)):
                return
            ledger.free(remove_hints(directory))
            if not remove_empty_namespace(directory):
                self._stuck[digest] = time.monotonic()

    # --- doing it

    def _evict(
        self, source: _Foreign | None, need: int, spare: Container[ChunkKey], ledger: Ledger, removal: Removal
    ) -> bool:
        """Unlink one batch; False where there was nothing to unlink, or where none of it could be."""
        if source is not None:
            return self._evict_foreign(source, need, ledger, removal)
        for respect_others in (True, True, True, False):
            victims = self._index.take_coldest(need, self._settings.headroom_bytes, EVICT_BATCH, spare)
            progress = False
            for key, entry in victims:
                path = self._layout.chunk(self._digest, key, entry.depth, entry.blocks)
                if respect_others and self._used_elsewhere(path, entry):
                    self._index.keep(key, entry)
                elif self._unlink(path, entry.nbytes, ledger, removal):
                    progress = True
                else:
                    self._index.keep(key, entry)
            if progress or not victims:
                return progress
        return False

    @staticmethod
    def _used_elsewhere(path: str, entry: Entry) -> bool:
        """Whether another store of this namespace has used a chunk since this one did: its time says so. The flow of
        time between a use and its way to the disk is the tolerance."""
        used_s = (recovery.file_time(path) or 0) // 1_000_000_000
        if used_s <= entry.used_s + 1:
            return False
        entry.used_s = used_s
        return True

    def _evict_foreign(self, source: _Foreign, need: int, ledger: Ledger, removal: Removal) -> bool:
        progress = False
        for _ in range(EVICT_BATCH):
            if not source.chunks:
                break
            path, nbytes = source.chunks[0]
            if need <= 0 and nbytes > need + self._settings.headroom_bytes:
                break
            source.chunks.popleft()
            if self._unlink(path, nbytes, ledger, removal):
                need -= nbytes
                progress = True
        return progress

    def _unlink(self, path: str, nbytes: int, ledger: Ledger, removal: Removal) -> bool:
        removed = removal.remove(path)
        if removed:
            ledger.free(nbytes)
            self._stats.evictions += 1
        return removed is not False

    def _recount(self) -> bool:
        """Count the directory again, if that has not been done lately: somebody may have deleted files by hand."""
        if time.monotonic() - self._recounted_at < _RECOUNT_INTERVAL_S:
            return False
        self._recounted_at = time.monotonic()
        with self._account.locked(STORE_LOCK_WAIT_S, force_recount=True):
            return True


def _period(path: str) -> int:
    """When a chunk was last used, as coarsely as its owner writes it down: within that the tail goes first."""
    return (recovery.file_time(path) or 0) // int(2e9 * UPKEEP_INTERVAL_S)
