"""Following what other stores do to this namespace: the index is a hint, and they store and evict beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.format import parse_names
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.session import Session, look_around
from lmcache_nvme_backend.store.settings import CHEAP_LISTING, LISTING_PAUSE_S, SETTLED_NS

_ALL_SHARDS: Final = frozenset(range(256))
# Of how many different sizes a namespace's chunks are expected to be: one, or one for each group of a hybrid model.
# With a codec there are more, and a look costs this many calls of a microsecond or two for nothing.
_SIZES: Final = 4


class Watcher:
    """Costs one lstat a lookup while this store has always been alone.

    While another live session shares the namespace, and once more after it has gone, a key that the index lacks is
    looked for on the disk before a lookup says no: by the name that it would have at its depth with a size that is
    usual here, and, where that fails and its directory has changed, by listing the directory. So what another process
    has stored is found by the first lookup after its `put` returned. The one exception: in a large namespace (more than
    `CHEAP_LISTING` chunks a directory, 128,000 in all) listings are held to a share of the time, and a chunk of an
    unusual size may be found by a later lookup only.

    From the first other session on (a store, or a tool that prunes), the deepest chunk found is checked to be there
    still: others evict the tail first, so where that one is there, the ones before it are. Where they are not, `get`
    finds out.
    """

    def __init__(self, layout: Layout, session: Session, digest: str, index: Index) -> None:
        self._layout = layout
        self._session = session
        self._digest = digest
        self._index = index
        self._sessions_ns = -1  # the session directory's time when it was read; -1: read it again
        self._seen_ns = -1  # the same, as it was last seen
        self._others = False
        self._shared = False
        self._known_ns = 0  # all that others had stored by then is in the index
        self._unseen: set[int] = set()  # shards where one that has gone may have left something since
        self._shards_ns: dict[int, int] = {}
        self._sizes: dict[int, None] = {}  # in blocks, the one seen last at the end
        self._no_listing_before = 0.0

    def begin(self) -> None:
        """Call it before the index is read, with this store's session there: who comes from now on is noticed."""
        self._known_ns = time.time_ns()
        try:
            self._seen_ns = osio.lstat(self._layout.sessions).st_mtime_ns
        except OSError:
            pass

    def doubt(self) -> None:
        """The index comes from a snapshot: until each directory has been listed, it may lack what others stored."""
        self._others = True
        self._known_ns = 0
        self._unseen = set(_ALL_SHARDS)

    def follow(self, keys: Sequence[ChunkKey], depths: Sequence[int] | None = None, listing: bool = True) -> None:
        """Bring the index up to date for a lookup of this prefix. `depths`: the keys', where they are not 0, 1, 2, …
        `listing`: whether to list a directory where a key is not found by its likely name."""
        now = time.time_ns()
        if self._read_sessions() and not self._shared and not self._unseen:
            self._known_ns = now
        if not self._others:
            return
        count = self._index.count_prefix(keys)
        if count:
            self._note_size(keys[count - 1])
        while count < len(keys) and self._look(keys[count], count if depths is None else depths[count], listing):
            count = self._index.count_prefix(keys, count)
        while count and self._is_gone(keys[count - 1]):
            count -= 1

    def _read_sessions(self) -> bool:
        """Who else is there, from memory while no session came or went. False where that cannot be told."""
        try:
            changed_ns = osio.lstat(self._layout.sessions).st_mtime_ns
            if changed_ns == self._sessions_ns:
                return True
            now = time.time_ns()
            peers, remains = look_around(self._layout)
        except OSError:
            return False
        others = [peer for peer in peers if peer.session_id != self._session.id]
        # Whoever came and went has stored, and has evicted what the index still holds, for all that is known.
        passed = remains or self._shared or self._seen_ns not in (-1, changed_ns)
        self._shared = any(peer.namespace == self._digest for peer in others)
        self._others = self._others or bool(others) or passed
        if passed or self._shared:
            self._unseen = set(_ALL_SHARDS)
        self._seen_ns = changed_ns
        self._sessions_ns = _settled(changed_ns, now)
        return True

    def _look(self, key: ChunkKey, depth: int, listing: bool) -> bool:
        """Whether a missing key is in the index after a look at the disk; `depth` is a guess."""
        shard = key[0]
        unseen = self._unseen  # another thread may replace it, for what happens after this look
        if not self._shared and shard not in unseen:
            return False
        try:
            changed_ns = osio.lstat(self._layout.shard(self._digest, key)).st_mtime_ns
        except FileNotFoundError:
            unseen.discard(shard)
            return False
        except OSError:
            return False
        if changed_ns == self._shards_ns.get(shard) or changed_ns < self._known_ns - SETTLED_NS:
            unseen.discard(shard)
            return False
        if self._guess(key, depth):
            return True
        if listing and self._list(shard, changed_ns):
            unseen.discard(shard)
        return key in self._index

    def _guess(self, key: ChunkKey, depth: int) -> bool:
        """Look for a chunk under the names that it most likely has."""
        for blocks in reversed(self._sizes):
            path = self._layout.chunk(self._digest, key, depth, blocks)
            try:
                osio.lstat(path)
                if recovery.leads_outside(path):
                    return False
            except OSError:
                continue
            self._index.add(key, depth, blocks, stored=False)
            return True
        return False

    def _list(self, shard: int, changed_ns: int) -> bool:
        """Add what a directory has and the index lacks. False where it cannot be listed, or not now."""
        now = time.time_ns()
        if time.monotonic() < self._no_listing_before:
            return False
        name = recovery.SHARDS[shard]
        try:
            names = recovery.list_dir_or_raise(f"{self._layout.namespace(self._digest)}/{name}")
        except OSError:
            return False
        new = None
        for chunk in parse_names(names, name)[0]:
            if chunk[0] not in self._index:
                self._index.add(*chunk, stored=False)
                new = chunk[0]
        if new is not None:
            self._note_size(new)
        self._shards_ns[shard] = _settled(changed_ns, now)
        if len(names) > CHEAP_LISTING:
            self._no_listing_before = time.monotonic() + len(names) * LISTING_PAUSE_S
        return True

    def _note_size(self, key: ChunkKey) -> None:
        entry = self._index.get(key)
        if entry is not None and entry.blocks != next(reversed(self._sizes), None):
            sizes = self._sizes.copy()
            sizes.pop(entry.blocks, None)
            sizes[entry.blocks] = None
            if len(sizes) > _SIZES:
                del sizes[next(iter(sizes))]
            self._sizes = sizes  # replaced and not changed: other threads go through it

    def _is_gone(self, key: ChunkKey) -> bool:
        entry = self._index.get(key)
        if entry is None:
            return True
        if recovery.is_gone(self._layout.chunk(self._digest, key, entry.depth, entry.blocks)):
            self._index.discard(key, entry)
            return True
        return False


def _settled(changed_ns: int, now_ns: int) -> int:
    """A directory's time that proves later that nothing has changed since; -1 where it proves nothing, since another
    change within the same tick of the kernel's clock would not move it."""
    return changed_ns if now_ns - changed_ns > SETTLED_NS else -1
