"""Which chunks are worth writing, decided before their bytes move.

Most chunks are never asked for again, and disks wear out. `second-sight` writes a chunk when it is asked for the second
time. That saves four of five writes, and gains hits where the disk is so small that most chunks would go before they
return, but loses them where it is not. `auto` knows which it is from what the policy has learned: it writes a chunk on
first sight while there is room, and else where the chance that it returns before it would have to go is at least
`WORTHWHILE_CHANCE`.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from lmcache_nvme_backend.store.account import Account
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.results import PutResult
from lmcache_nvme_backend.store.settings import StoreSettings
from lmcache_nvme_backend.store.write_budget import WriteBudget

# benchmarks/eviction.py: on the conversation trace 0.1 writes a third of what `all` does at 1 % capacity and two
# thirds at 5 %, and loses no hits; 0.15 loses 1.3 points at 10 %, 0.05 saves little at 5 %.
WORTHWHILE_CHANCE: Final = 0.1
# Evicting frees some headroom at a time (1/64 of the quota at most), so a full root is never quite full.
_FULL_SHARE: Final = 31 / 32
# Chunks admitted within this time have not all been written, and taken out of the budget, yet.
_LOOK_INTERVAL_S: Final = 1.0


class Admission:
    """Thread-safe. Asked for the chunks of a prefix in their order; what follows a refused one is of no use."""

    def __init__(self, settings: StoreSettings, account: Account, index: Index, budget: WriteBudget) -> None:
        self._settings = settings
        self._account = account
        self._index = index
        self._budget = budget
        self._mutex = threading.Lock()
        self._left = 0  # of the budget, as of `_left_at`, less what has been admitted since
        self._left_at = float("-inf")

    def refusal(self, key: ChunkKey, nbytes: int) -> PutResult | None:
        """Why a chunk that is not here is not to be written, as one of `nbytes`; None where it is."""
        limited = self._budget.limited
        if limited and self._look() < nbytes:
            return PutResult.WRITE_BUDGET
        if not self._is_worth_it(key, limited and self._budget.is_scarce(self._left)):
            return PutResult.FIRST_SIGHT
        if limited:
            with self._mutex:
                self._left -= nbytes
        return None

    def _is_worth_it(self, key: ChunkKey, scarce: bool) -> bool:
        mode = self._settings.admission
        if mode == "all" or self._index.offered(key) > 0:
            return True
        if mode == "second-sight" or scarce:
            return False
        return not self._is_full() or self._index.chance(key) >= WORTHWHILE_CHANCE

    def _look(self) -> int:
        """What the budget has left beside what was just admitted: writes run side by side, and what a prefix gets of it
        has to be its head."""
        with self._mutex:
            now = time.monotonic()
            if now - self._left_at > _LOOK_INTERVAL_S:
                self._left, self._left_at = self._budget.left(), now
            return self._left

    def _is_full(self) -> bool:
        ledger = self._account.peek()
        return ledger is not None and ledger.used + ledger.reserved >= self._settings.quota_bytes * _FULL_SHARE
