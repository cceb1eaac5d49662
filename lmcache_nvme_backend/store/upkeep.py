"""What a store does in the background: bring recency to disk, read it back after open, settle what is owed."""

from __future__ import annotations

import threading
import time
from typing import Final

from lmcache_nvme_backend.store import osio, recovery
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.layout import Layout
from lmcache_nvme_backend.store.namespace import DESCRIPTION
from lmcache_nvme_backend.store.settings import RANK_AT_OPEN, TOUCHES_PER_UPKEEP, UPKEEP_INTERVAL_S
from lmcache_nvme_backend.store.writer import Writer

# namespace.json's time says when the namespace was last used; it decides between namespaces, so minutes are enough.
_USE_INTERVAL_S: Final = 60.0


class Upkeep:
    """One thread a store."""

    def __init__(self, layout: Layout, digest: str, index: Index, writer: Writer) -> None:
        self._layout = layout
        self._digest = digest
        self._index = index
        self._writer = writer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvme-store-upkeep", daemon=True)
        self._ranked = False
        self._used_at = float("-inf")

    def start(self) -> None:
        if len(self._index) <= RANK_AT_OPEN:
            self._rank()
        self._mark_use()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after one last write of what is not on disk yet."""
        self._stopping.set()
        self._thread.join()
        self._flush(limit=len(self._index))
        self._mark_use()

    def _run(self) -> None:
        if not self._ranked:
            self._rank()
        while not self._stopping.wait(UPKEEP_INTERVAL_S):
            self._flush(TOUCHES_PER_UPKEEP)
            self._writer.settle()
            if time.monotonic() - self._used_at > _USE_INTERVAL_S:
                self._mark_use()

    def _rank(self) -> None:
        """Read when each chunk was last used, and order the index by it."""
        times = {}
        for key in self._index.keys():
            entry = self._index.get(key)
            if self._stopping.is_set():
                return
            if entry is not None:
                path = self._layout.chunk(self._digest, key, entry.depth, entry.blocks)
                times[key] = recovery.file_time(path) or 0
        self._index.rank(times)
        self._ranked = True

    def _flush(self, limit: int) -> None:
        for key, entry, ns in self._index.take_times(limit):
            try:
                osio.utime(self._layout.chunk(self._digest, key, entry.depth, entry.blocks), ns)
            except OSError:
                pass  # evicted by another process, or a disk that fails: recency is a hint

    def _mark_use(self) -> None:
        self._used_at = time.monotonic()
        try:
            osio.utime(f"{self._layout.namespace(self._digest)}/{DESCRIPTION}", time.time_ns())
        except OSError:
            pass
