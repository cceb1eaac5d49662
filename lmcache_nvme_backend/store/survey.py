"""What lies in a cache directory, counted for people: its parts, their sizes, and when they were last used.

Nothing here takes a lock or changes anything, so it may run beside engines; what they change meanwhile is counted as it
was before or after.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

DAY_S: Final = 86_400
# The classes of "last used within"; what was used longer ago than the last one is a class of its own.
RECENCY_S: Final = (3600, DAY_S, 7 * DAY_S, 30 * DAY_S)


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One chunk's file, as a look at its directory entry tells."""

    path: str  # below the part that holds it
    nbytes: int
    depth: int  # chunks before it in its prefix; 0 where the layout does not say
    used_ns: int  # since the epoch


class Recency(msgspec.Struct):
    """Chunks last used within so many seconds, and not within the next smaller class; None: longer ago than all."""

    within_s: int | None
    chunks: int = 0
    nbytes: int = 0


class Part(msgspec.Struct):
    """The chunks of one namespace, or of one configuration of vLLM's own tier, in all its ranks.

    `open_by` is None where the layout does not tell. Times are nanoseconds since the epoch, None where there is
    no chunk.
    """

    name: str
    facts: dict[str, Any] | None = None  # None: its description is missing or damaged
    model_name: str | None = None
    chunks: int = 0
    nbytes: int = 0
    other_bytes: int = 0  # files that are no chunks
    used_ns: int | None = None
    coldest_ns: int | None = None
    recency: list[Recency] = msgspec.field(default_factory=lambda: [Recency(bound) for bound in (*RECENCY_S, None)])
    open_by: list[int] | None = None  # process ids
    stale: str | None = None  # why, where it is

    def count(self, chunks: Iterable[Seen], now_ns: int) -> None:
        """Add chunks to the figures."""
        for seen in chunks:
            self.chunks += 1
            self.nbytes += seen.nbytes
            if self.used_ns is None or seen.used_ns > self.used_ns:
                self.used_ns = seen.used_ns
            if self.coldest_ns is None or seen.used_ns < self.coldest_ns:
                self.coldest_ns = seen.used_ns
            idle_s = (now_ns - seen.used_ns) / 1e9
            for class_ in self.recency:
                if class_.within_s is None or idle_s <= class_.within_s:
                    class_.chunks += 1
                    class_.nbytes += seen.nbytes
                    break


class Ledgers(msgspec.Struct):
    """The account of a root beside what was found there. Bytes."""

    account_used: int | None  # before the count; None where the account cannot be read
    account_used_after: int | None  # after it: where the two differ, an engine was at work meanwhile
    account_reserved: int | None  # room promised to writes in flight
    unfinished: bool  # somebody was changing the account just then, or died doing so
    found: int  # everything that the account counts
    quotas: list[int]  # of the stores that are open now, each once


class Survey(msgspec.Struct):
    """A whole cache directory of one layout."""

    layout: Literal["nvme", "vllm-fs"]
    root: str
    parts: list[Part]
    nbytes: int  # chunks
    temporaries: int
    temporary_bytes: int
    foreign_bytes: int  # files under the root that belong to none of the parts
    ledgers: Ledgers | None  # None: a layout without quota and account
    reads_count_as_use: bool  # whether the times tell of reads, too
    taken_ns: int


def now_ns() -> int:
    return time.time_ns()
