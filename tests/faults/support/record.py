"""What a process did before it was killed: a list in memory that it shares with whoever kills it."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from enum import IntEnum

_SLOT = struct.Struct("<BB16s")
_HEAD = struct.Struct("<QQ")  # records, turns of the second process


class Did(IntEnum):
    PUTTING = 1  # a store of a chunk has been called,
    PUT = 2  # and has returned
    RENAMING = 3  # a chunk is about to get its name,
    RENAMED = 4  # and has it
    UNLINKING = 5  # a chunk is about to lose it,
    UNLINKED = 6  # and has lost it
    WRONG = 7  # a load gave other bytes than were stored
    LOADED = 8
    FOUND = 9  # a fresh store found this chunk, and its bytes are right


Chunk = tuple[int, bytes]  # which namespace, key


class Record:
    """Made before a fork; appended to by any process and thread after it. `RENAMED` and `UNLINKED` are written with the
    root's lock held, so their order is the order of what happened."""

    def __init__(self, nbytes: int = 8 << 20) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self._mutex = threading.Lock()
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this

    def clear(self) -> None:
        _HEAD.pack_into(self._memory, 0, 0, 0)

    def append(self, did: Did, which: int, key: bytes) -> None:
        with self._mutex:
            fcntl.lockf(self._lock, fcntl.LOCK_EX)  # between processes; gone with its process
            try:
                count, turns = _HEAD.unpack_from(self._memory)
                _SLOT.pack_into(self._memory, _HEAD.size + count * _SLOT.size, did, which, key)
                _HEAD.pack_into(self._memory, 0, count + 1, turns)
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def __iter__(self) -> Iterator[tuple[Did, Chunk]]:
        (count, _) = _HEAD.unpack_from(self._memory)
        for number in range(count):
            did, which, key = _SLOT.unpack_from(self._memory, _HEAD.size + number * _SLOT.size)
            yield Did(did), (which, key)

    def count(self, did: Did) -> int:
        return sum(each is did for each, _ in self)


class Expected:
    """What must, and what may, lie under a root."""

    def __init__(self) -> None:
        self.sure: set[Chunk] = set()
        self.maybe: set[Chunk] = set()  # a call was on its way when the process was killed
        self.in_flight: set[Chunk] = set()  # stores that had not returned

    def replay(self, record: Record) -> None:
        for did, chunk in record:
            match did:
                case Did.PUTTING:
                    self.in_flight.add(chunk)
                case Did.PUT:
                    self.in_flight.discard(chunk)
                case Did.RENAMING | Did.UNLINKING:
                    self.sure.discard(chunk)
                    self.maybe.add(chunk)
                case Did.RENAMED:
                    self.maybe.discard(chunk)
                    self.sure.add(chunk)
                case Did.UNLINKED:
                    self.maybe.discard(chunk)
                    self.sure.discard(chunk)

    def settle(self, found: set[Chunk]) -> None:
        self.sure, self.maybe, self.in_flight = set(found), set(), set()


def descriptor_free(path: str) -> bool:
    """Whether nobody holds the lock of this file."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
