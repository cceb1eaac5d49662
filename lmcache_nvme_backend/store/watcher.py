"""Following what other stores do to this namespace: the index is a hint, and they store and evict beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.session import Session, live_peers
from lmcache_nvme_backend.store.settings import SETTLED_NS


class Watcher:
    """Costs one lstat a lookup while this store has always been alone.

    While another live session shares the namespace, a missing key's directory is listed again if it has changed. From
    the first other session on (a store, or a tool that prunes), the deepest chunk found is checked to be there still:
    others evict the tail first, so where that one is there, the ones before it are. Where they are not, `get` finds
    out.
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
        self._shards_ns: dict[int, int] = {}

    def begin(self) -> None:
        """Call it before the index is read, with this store's session there: who comes from now on is noticed."""
        try:
            self._seen_ns = osio.lstat(self._layout.sessions).st_mtime_ns
        except OSError:
            pass

    def follow(self, keys: Sequence[ChunkKey]) -> None:
        """Bring the index up to date for a lookup of this prefix."""
        self._read_sessions()
        if not self._others:
            return
        count = self._index.count_prefix(keys)
        while self._shared and count < len(keys) and self._look(keys[count]):
            count = self._index.count_prefix(keys, count)
        while count and self._is_gone(keys[count - 1]):
            count -= 1

    def _read_sessions(self) -> None:
        """Who else is there, from memory while no session came or went."""
        try:
            changed_ns = osio.lstat(self._layout.sessions).st_mtime_ns
            if changed_ns == self._sessions_ns:
                return
            now = time.time_ns()
            others = [peer for peer in live_peers(self._layout) if peer.session_id != self._session.id]
        except OSError:
            return
        # Whoever came and went has evicted, for all that is known, what the index still holds.
        self._others = self._others or bool(others) or self._seen_ns not in (-1, changed_ns)
        self._seen_ns = changed_ns
        self._shared = any(peer.namespace == self._digest for peer in others)
        self._sessions_ns = _settled(changed_ns, now)

    def _look(self, key: ChunkKey) -> bool:
        """Whether a missing key is in the index after a look at its directory."""
        shard = key[0]
        try:
            changed_ns = osio.lstat(self._layout.shard(self._digest, key)).st_mtime_ns
        except OSError:
            return False
        if changed_ns == self._shards_ns.get(shard):
            return False
        now = time.time_ns()
        for found, depth, blocks in recovery.shard_chunks(self._layout.namespace(self._digest), f"{shard:02x}"):
            self._index.add(found, depth, blocks, stored=False)
        self._shards_ns[shard] = _settled(changed_ns, now)
        return key in self._index

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
