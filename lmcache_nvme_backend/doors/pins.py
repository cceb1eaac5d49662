"""Pins that lookups take for a request, with an end: a request that is aborted before it runs never gives them back."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_nvme_backend.store import ChunkKey


class PinLedger:
    """Counts pins handed out per chunk and takes back those older than ``lifetime_s`` (LMCache's pin_timeout_sec)."""

    def __init__(self, unpin: Callable[[ChunkKey], bool], lifetime_s: float) -> None:
        self._unpin, self._lifetime = unpin, lifetime_s
        self._lock = threading.Lock()
        self._held: OrderedDict[ChunkKey, tuple[int, float]] = OrderedDict()
        self.expired = 0

    def taken(self, keys: Sequence[ChunkKey]) -> None:
        """Record pins just taken in the store; a newer pin renews the older ones of the same chunk."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                count, _ = self._held.pop(key, (0, now))
                self._held[key] = (count + 1, now)
        self._expire(now)

    def given_back(self, key: ChunkKey) -> bool:
        """Undo one pin; False where there is none (never taken, or expired)."""
        with self._lock:
            count, since = self._held.get(key, (0, 0.0))
            if count == 0:
                return False
            if count == 1:
                del self._held[key]
            else:
                self._held[key] = (count - 1, since)
        return self._unpin(key)

    def _expire(self, now: float) -> None:
        stale: list[tuple[ChunkKey, int]] = []
        with self._lock:
            while self._held:
                key, (count, since) = next(iter(self._held.items()))
                if now - since < self._lifetime:
                    break
                del self._held[key]
                stale.append((key, count))
        for key, count in stale:
            self.expired += count
            for _ in range(count):
                self._unpin(key)
