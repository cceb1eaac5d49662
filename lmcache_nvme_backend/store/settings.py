"""Settings of one store, and the fixed bounds with the reason for each."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

# A put waits this long for the root's lock, then drops its chunk. Holders keep it for tens of microseconds, except for
# a recount after a crash; a longer wait would only pile up writers behind that.
STORE_LOCK_WAIT_S: Final = 1.0
# One put evicts for at most this long.
EVICT_WAIT_S: Final = 2.0
# Victims unlinked in one hold of the root's lock, some 20 us each.
EVICT_BATCH: Final = 16
# Freed beyond the need, so that not every put has to evict: the smaller of 1/64 of the quota and this.
EVICT_HEADROOM_BYTES: Final = 64 << 20
# Recency goes to disk this often: what a SIGKILL can lose of it.
UPKEEP_INTERVAL_S: Final = 2.0
# File times written in one interval at most (some 5 us each, so 3 % of a core); the rest waits for the next.
TOUCHES_PER_UPKEEP: Final = 12_000
# Buffered writes are clean, and can be dropped from the page cache, this long after they were started.
WRITE_BACK_S: Final = 5.0
# Up to this many files open reads the recency itself (13 us each); above, a thread does it once lookups work.
RANK_AT_OPEN: Final = 2_000
# Below this many chunks a namespace has no snapshot: listing it takes a millisecond.
SNAPSHOT_FROM: Final = 256
# What is remembered of chunks that went, 512 KiB, is written this often and at the end; not where it would take more
# than a 64th of the quota.
GHOSTS_INTERVAL_S: Final = 300.0
GHOSTS_SHARE: Final = 64
# A new snapshot this often, where anything changed: 26 bytes a chunk, so some 4 GB a day for a million of them.
SNAPSHOT_INTERVAL_S: Final = 600.0
# close() waits this long for calls in flight; a disk that hangs longer must not hang the engine's exit.
CLOSE_WAIT_S: Final = 30.0
# How far a directory's time must lie back to prove that nothing changed since: file times move in kernel ticks.
SETTLED_NS: Final = 50_000_000
# Listing a directory for a chunk that the index lacks takes some 2 us a name, on the engine's way. After a listing of
# more names than this the next one waits for so long a name, which holds listings to a twentieth of the time.
CHEAP_LISTING: Final = 500
LISTING_PAUSE_S: Final = 40e-6


class StoreSettings(msgspec.Struct, frozen=True):
    """How a store behaves.

    `quota_bytes` is for everything under the root, whoever put it there. `direct_io`: "auto" falls back to buffered
    I/O with a warning, "on" refuses to open instead. `fsync`: "data" calls fdatasync before a chunk is published;
    correctness does not need it. `codec` is for new chunks; any chunk can be read; "zstd-split" is for payloads of
    16-bit numbers. `lock_wait_s` bounds the wait for another process at open. `admission` is what
    `ChunkStore.refusal` goes by; the write budget, 0 for none, is the root's, and `put` keeps it as well.
    """

    quota_bytes: int
    direct_io: Literal["auto", "on", "off"] = "auto"
    fsync: Literal["none", "data"] = "none"
    codec: Literal["none", "zstd", "zstd-split"] = "none"
    lock_wait_s: float = 30.0
    admission: Literal["all", "second-sight", "auto"] = "all"
    write_budget_bytes_per_day: int = 0

    @property
    def headroom_bytes(self) -> int:
        return min(self.quota_bytes // 64, EVICT_HEADROOM_BYTES)
