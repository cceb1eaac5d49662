"""How much may be written to a root a day, by all its processes together: disks wear out.

A token bucket in a small file of the root, changed inside the root's lock, so that neither a second process nor a
restart gets a budget of its own. It holds a quarter of a day's budget at most and is filled with the other three
quarters a day: no 24 hours see more than the budget. The file, little-endian: magic (``4b 56 57 52 54 45 01 0a``,
"KVWRTE", the format's version, a line feed), bytes left, ns since the epoch at that time, XXH3-64 of the 24 before.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import Final

import xxhash

from lmcache_nvme_backend.store import osio

_MAGIC: Final = b"KVWRTE\x01\n"
_RECORD = struct.Struct("<8sQQ")
_SIZE: Final = _RECORD.size + 8
_DAY_NS: Final = 86_400_000_000_000
BURST: Final = 4  # the bucket holds a day's budget divided by this


class WriteBudget:
    """`bytes_per_day` 0 is no limit. `take` is called inside the root's lock, `left` by anybody."""

    def __init__(self, path: str, bytes_per_day: int, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._clock_ns = clock_ns
        self._most = bytes_per_day // BURST
        self._refill = bytes_per_day - self._most  # a day
        self.limited = bytes_per_day > 0

    def left(self) -> int:
        """Bytes that may be written now. A file that is damaged or cannot be read leaves nothing until it has been
        filled again; one that is missing is a new root."""
        try:
            fd = osio.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return self._most
        except OSError:
            return 0
        try:
            data = osio.pread(fd, _SIZE, 0)
        except OSError:
            return 0
        finally:
            osio.close_quietly(fd)
        now = self._clock_ns()
        left, since = _parse(data) or (0, now)
        return min(self._most, left + max(0, now - since) * self._refill // _DAY_NS)

    def is_scarce(self, left: int) -> bool:
        """Whether less than half of what the bucket can hold is left."""
        return left < self._most // 2

    def take(self, nbytes: int) -> bool:
        """Spend bytes that are about to be written; False where that many are not left. Raises `OSError` where it
        cannot be noted: nothing is spent then."""
        if not self.limited:
            return True
        left = self.left()
        taken = left >= nbytes
        self._write(left - nbytes if taken else left)
        return taken

    def _write(self, left: int) -> None:
        record = _RECORD.pack(_MAGIC, left, self._clock_ns())
        fd = osio.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            osio.fchmod(fd, 0o600)
            osio.pwrite(fd, record + xxhash.xxh3_64_intdigest(record).to_bytes(8, "little"), 0)
        finally:
            osio.close_quietly(fd)


def _parse(data: bytes) -> tuple[int, int] | None:
    if len(data) != _SIZE or xxhash.xxh3_64_intdigest(data[: _RECORD.size]) != int.from_bytes(data[-8:], "little"):
        return None
    magic, left, since = _RECORD.unpack_from(data)
    return (left, since) if magic == _MAGIC else None
