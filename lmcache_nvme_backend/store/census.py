"""What lies under a root, as one store counts it: the index of its own namespace, and the bytes of everything."""

from __future__ import annotations

from lmcache_nvme_backend.store import osio, recovery, session, snapshot
from lmcache_nvme_backend.store.account import Ledger
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION, NamespaceDigest
from lmcache_nvme_backend.store.policy import NO_STATES
from lmcache_nvme_backend.store.removal import remove_file
from lmcache_nvme_backend.store.session import Session
from lmcache_nvme_backend.store.settings import RANK_AT_OPEN


class Census:
    """Fills the index, once: from a snapshot where the namespace is large and nobody else is there, else from a
    listing. `recount` is the account's, and brings an index from a snapshot in line with what it finds."""

    def __init__(self, layout: Layout, namespace: NamespaceDigest, own: Session, index: Index) -> None:
        self._layout = layout
        self._namespace = namespace
        self._session = own
        self._index = index
        self._directory = layout.namespace(namespace.digest)
        self._hint: snapshot.Snapshot | None = None  # while opening
        self._loaded = False
        self.exact = False  # whether the hint's order is the last word
        self.unlisted = False  # the index comes from the hint, and the directory has not been listed yet
        self.foreign_bytes = 0  # as of the last count
        self.doubles: list[recovery.Chunk] = []  # whose key lies there under another name, too

    def read_hint(self) -> bool:
        """Read the snapshot; False where there is one that is of no use. Its order is exact where nobody has used the
        namespace since it was written."""
        try:
            self._hint = snapshot.read(self._directory, self._namespace.raw_digest)
        except (OSError, ValueError):
            return False
        used_ns = recovery.file_time(f"{self._directory}/{DESCRIPTION}")
        hint = self._hint
        self.exact = hint is not None and hint.closed and used_ns is not None and hint.written_ns >= used_ns
        return True

    def begin(self, ledger: Ledger) -> None:
        """Inside the lock: nobody has kept the account while no store was open, since files may have come and gone."""
        if self._loaded or any(peer.session_id != self._session.id for peer in session.live_peers(self._layout)):
            return
        if self._hint is not None and len(self._hint) > RANK_AT_OPEN:
            self._index.restore(self._hint, self.exact)
            self._loaded = self.unlisted = ledger.stale = True
            return
        found = self.recount()
        ledger.used, ledger.reserved = found.used, found.reserved

    def finish(self) -> None:
        """Outside the lock, once: list the namespace, where that has not been done."""
        if not self._loaded:
            self._load(recovery.NamespaceScan(self._directory))
        self._hint = None

    def _load(self, scan: recovery.NamespaceScan) -> int:
        """Fill the index; returns the bytes of all that lies in the namespace."""
        self.doubles = self._index.load(scan, self._hint.states_by_key() if self._hint is not None else NO_STATES)
        self._loaded = True
        return self._index.nbytes + sum(blocks for _, _, blocks in self.doubles) * BLOCK + scan.other_bytes

    def recount(self) -> Ledger:
        """Count everything under the root. Called with the account's lock held; also puts back directories and the
        session's file, which somebody may have deleted with the rest, and reads the index if that is still to be done,
        so that a large namespace is listed only once."""
        layout = self._layout
        for path in (layout.base, layout.sessions, layout.temp):
            osio.make_dir(path)
        self._session.ensure()
        session.sweep(layout, Ledger(0, 0))
        scan = recovery.NamespaceScan(self._directory)
        if self.unlisted:
            used, doubles = self._index.reconcile(scan.shards())
            for key, depth, blocks in doubles:
                if remove_file(layout.chunk(self._namespace.digest, key, depth, blocks)) is False:
                    used += blocks * BLOCK
            self.unlisted = False
            used += scan.other_bytes
        else:
            used = recovery.count_namespace(self._directory) if self._loaded else self._load(scan)
        used += recovery.count_store(layout, skip=self._namespace.digest)
        self.foreign_bytes = recovery.count_foreign(layout)
        used += self.foreign_bytes
        # This store's own part is known better than from its record, whose last writing may have failed.
        others = sum(peer.reserved for peer in session.live_peers(layout) if peer.session_id != self._session.id)
        return Ledger(used, others + self._session.reserved)
