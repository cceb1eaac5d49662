"""What is remembered of chunks that are not here: that they were asked for, and how often.

A table of fixed size in which newer chunks take the slots of older ones: forgetting is always safe, and so is a damaged
or missing file, which is an empty table. Little-endian:

======  ====  ==========================================================================================
offset  size  field
======  ====  ==========================================================================================
0       8     magic, ``4b 56 47 48 53 54 01 0a`` ("KVGHST", the format's version, a line feed)
8       16    namespace digest
24      8 n   slots, n = 65536: fingerprint of the key << 32 | uses << 30 | second of the last use mod 2**30
…       8     XXH3-64 of everything before
======  ====  ==========================================================================================
"""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections.abc import Iterator
from typing import Final

import xxhash

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.keys import ChunkKey

FILE: Final = "ghosts"
# 512 KiB of memory and of disk a namespace. On the conversation trace that is a third of all blocks of an hour.
SLOTS: Final = 1 << 16
# A chunk has one of this many slots: the oldest of eight go nearly in the order of their age, and one look is short.
_WAYS: Final = 8
MAX_USES: Final = 3

_MAGIC: Final = b"KVGHST\x01\n"
_TIME_MASK: Final = (1 << 30) - 1
FILE_BYTES: Final = 8 + 16 + 8 * SLOTS + 8


class Ghosts:
    """Not thread-safe: called with the index's lock held."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * SLOTS))
        self.changed = False

    def find(self, key: ChunkKey) -> tuple[int, int] | None:
        """(uses, second of the last one mod 2**30) of a chunk; None where it is not remembered."""
        at = int.from_bytes(key[8:10], "little") & -_WAYS
        mark = int.from_bytes(key[10:14], "little")
        for slot in self._slots[at : at + _WAYS]:
            if slot >> 32 == mark and slot:
                return slot >> 30 & MAX_USES, slot & _TIME_MASK
        return None

    def put(self, key: ChunkKey, uses: int, now_s: int) -> None:
        """Remember a chunk, in place of the one in its set that was used longest ago."""
        at = int.from_bytes(key[8:10], "little") & -_WAYS
        mark = int.from_bytes(key[10:14], "little")
        oldest, oldest_age = at, -1
        for place, slot in enumerate(self._slots[at : at + _WAYS], at):
            age = seconds_between(slot & _TIME_MASK, now_s) if slot else _TIME_MASK
            if slot and slot >> 32 == mark:
                oldest = place
                break
            if age > oldest_age:
                oldest, oldest_age = place, age
        self._slots[oldest] = mark << 32 | min(uses, MAX_USES) << 30 | now_s & _TIME_MASK
        self.changed = True

    def encode(self, namespace: bytes) -> Iterator[bytes]:
        """The file's `FILE_BYTES` bytes. The table may change meanwhile: any mixture of slots is a table."""
        self.changed = False
        data = _MAGIC + namespace + _little(self._slots).tobytes()
        yield data
        yield xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")

    def read(self, directory: str, namespace: bytes) -> None:
        """Take over what a namespace's file says, if it is whole."""
        try:
            fd = osio.open(f"{directory}/{FILE}", os.O_RDONLY)
        except OSError:
            return
        try:
            found = osio.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != FILE_BYTES:
                return
            data = osio.pread(fd, FILE_BYTES, 0)
        except OSError:
            return
        finally:
            osio.close_quietly(fd)
        if len(data) != FILE_BYTES or data[:24] != _MAGIC + namespace:
            return
        if xxhash.xxh3_64_intdigest(data[:-8]) != int.from_bytes(data[-8:], "little"):
            return
        slots = array("Q")
        slots.frombytes(data[24:-8])
        self._slots = _little(slots)


def seconds_between(then_s: int, now_s: int) -> int:
    """Seconds since a time mod 2**30."""
    return now_s - then_s & _TIME_MASK


def _little(slots: array[int]) -> array[int]:
    if sys.byteorder == "big":
        slots = array("Q", slots)
        slots.byteswap()
    return slots
