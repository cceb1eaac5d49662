"""Finding what another store of the same namespace has stored meanwhile."""

from __future__ import annotations

import time

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.session import Session, Sharers
from lmcache_nvme_backend.store.settings import SETTLED_NS


class Watcher:
    """Looks into a missing key's directory again where another live session shares the namespace and the directory has
    changed. Costs one lstat a lookup while nobody shares."""

    def __init__(self, layout: Layout, session: Session, digest: str, index: Index) -> None:
        self._layout = layout
        self._digest = digest
        self._index = index
        self._sharers = Sharers(layout, session, digest)
        self._seen_ns: dict[int, int] = {}  # shard -> the directory's time when it was listed

    def shared(self) -> bool:
        return self._sharers.exist()

    def looked_at_all(self) -> None:
        """Call before the whole namespace is listed."""
        self._seen_ns.clear()

    def look(self, key: ChunkKey) -> bool:
        """Whether a missing key is in the index after a look at its directory."""
        shard = key[0]
        try:
            changed_ns = osio.lstat(self._layout.shard(self._digest, key)).st_mtime_ns
        except OSError:
            return False
        if changed_ns == self._seen_ns.get(shard):
            return False
        now = time.time_ns()
        for found, depth, blocks in recovery.shard_chunks(self._layout.namespace(self._digest), f"{shard:02x}"):
            self._index.add(found, depth, blocks)
        self._seen_ns[shard] = changed_ns if now - changed_ns > SETTLED_NS else -1
        return key in self._index
