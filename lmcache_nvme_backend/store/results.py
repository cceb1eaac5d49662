"""What the store answers with: values, not exceptions."""

from __future__ import annotations

from enum import Enum

import msgspec


class PutResult(Enum):
    """The outcome of `ChunkStore.put`. `kept` is true where the chunk can be expected to be found later."""

    STORED = "stored"
    EXISTS = "exists"  # it was there already; its recency is refreshed
    BUSY = "busy"  # another thread of this store is storing this very key; ask `contains` for its outcome
    QUOTA = "quota"  # nothing could be evicted for it (pinned, its own prefix, or larger than the quota)
    NO_SPACE = "no space"  # the disk is full, below the quota, also after an eviction
    IO_ERROR = "io error"
    LOCK_WAIT = "lock wait"  # the root's lock was not free within the store path's bound
    ASIDE = "stepped aside"  # the disk fails, and nothing is asked of it for the time being
    CLOSED = "closed"
    FIRST_SIGHT = "first sight"  # not worth writing before it is asked for again
    WRITE_BUDGET = "write budget"  # the day's budget of bytes is spent

    @property
    def kept(self) -> bool:
        return self in (PutResult.STORED, PutResult.EXISTS, PutResult.BUSY)

    @property
    def decided(self) -> bool:
        """True where it was not stored by decision: nothing has failed."""
        return self in (PutResult.FIRST_SIGHT, PutResult.WRITE_BUDGET)


class MissCause(Enum):
    """Why `ChunkStore.get` had nothing to give."""

    ABSENT = "absent"
    TRUNCATED = "truncated"  # the file is not of the size its name says, or not a regular file
    MAGIC = "magic"
    VERSION = "version"
    HEADER_CHECKSUM = "header checksum"
    CODEC = "codec"  # an unknown codec or flag, or data that does not decompress
    KEY = "key"
    NAMESPACE = "namespace"
    NAME = "name"  # depth in the name and in the header differ
    LENGTH = "length"  # the header's lengths do not agree with each other or with the file
    PAYLOAD_CHECKSUM = "payload checksum"
    UNREADABLE = "unreadable"  # the disk cannot read this file; another may be readable
    IO_ERROR = "io error"
    TOO_LARGE = "too large for the buffer"
    ASIDE = "stepped aside"
    CLOSED = "closed"

    @property
    def corrupt(self) -> bool:
        """True where the file itself is bad: it has been removed."""
        return self not in _NOT_CORRUPT


_NOT_CORRUPT = frozenset((MissCause.ABSENT, MissCause.IO_ERROR, MissCause.TOO_LARGE, MissCause.ASIDE, MissCause.CLOSED))


class Hit(msgspec.Struct, frozen=True):
    nbytes: int  # payload bytes now in the buffer (decompressed)
    tokens: int  # as given to put


class Miss(msgspec.Struct, frozen=True):
    cause: MissCause


GetResult = Hit | Miss


class Usage(msgspec.Struct, frozen=True):
    """Bytes are file sizes: header and padding included."""

    used_bytes: int  # everything under the root, all namespaces and processes
    reserved_bytes: int  # room promised to writes in flight, all processes
    quota_bytes: int
    namespace_bytes: int  # this namespace, as this store knows it
    namespace_chunks: int


class StoreStats(msgspec.Struct):
    """Counters since open. Payload bytes are what crossed the disk: after compression, without header and padding."""

    hits: int = 0
    misses: dict[MissCause, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MissCause, 0))
    puts: dict[PutResult, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PutResult, 0))
    evictions: int = 0  # chunks this store removed for room, in any namespace
    bytes_read: int = 0
    bytes_written: int = 0
    snapshots_ignored: int = 0  # damaged, or of something else; the directory was listed instead

    @property
    def stores(self) -> int:
        return self.puts[PutResult.STORED]

    @property
    def drops(self) -> dict[PutResult, int]:
        return {result: count for result, count in self.puts.items() if not result.kept}

    @property
    def corrupt(self) -> dict[MissCause, int]:
        return {cause: count for cause, count in self.misses.items() if cause.corrupt}
