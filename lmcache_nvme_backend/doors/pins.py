"""Pins that lookups take for a request, with an end: a request that is aborted before it runs never gives them back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat

from lmcache_nvme_backend.store import ChunkKey

# Old pins are looked for this often within their lifetime: a look goes through all pins that are held.
_LOOKS = 8


class PinLedger:
    """Counts pins handed out per chunk and takes back those older than ``lifetime_s`` (LMCache's pin_timeout_sec)."""

    def __init__(self, unpin: Callable[[ChunkKey], bool], lifetime_s: float) -> None:
        self._unpin, self._lifetime = unpin, lifetime_s
        self._lock = threading.Lock()
        self._counts: Counter[ChunkKey] = Counter()
        self._since: dict[ChunkKey, float] = {}  # the newest pin of each
        self._looked = time.monotonic()
        self.expired = 0

    def taken(self, keys: Sequence[ChunkKey]) -> None:
        """Record pins just taken in the store; a newer pin renews the older ones of the same chunk."""
        now = time.monotonic()
        with self._lock:
            self._counts.update(keys)
            self._since.update(zip(keys, repeat(now)))
        if now - self._looked >= self._lifetime / _LOOKS:
            self._expire(now)

    def given_back(self, key: ChunkKey) -> bool:
        """Undo one pin; False where there is none (never taken, or expired)."""
        with self._lock:
            count = self._counts.get(key, 0)
            if count == 0:
                return False
            if count == 1:
                del self._counts[key], self._since[key]
            else:
                self._counts[key] = count - 1
        return self._unpin(key)

    def holds(self, key: ChunkKey) -> bool:
        """Whether a chunk is pinned by a lookup that is not older than the pins' lifetime."""
        with self._lock:
            since = self._since.get(key)
        return since is not None and time.monotonic() - since < self._lifetime

    def _expire(self, now: float) -> None:
        with self._lock:
            self._looked = now
            stale = [(key, self._counts[key]) for key, since in self._since.items() if now - since >= self._lifetime]
            for key, _ in stale:
                del self._counts[key], self._since[key]
        for key, count in stale:
            self.expired += count
            for _ in range(count):
                self._unpin(key)
