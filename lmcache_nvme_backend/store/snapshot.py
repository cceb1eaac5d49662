"""A namespace's index as of a moment, in eviction order: a hint, never trusted for correctness.

It makes a large namespace usable before its directory has been listed, keeps the order of eviction without reading the
time of every file, and carries a small number a chunk for the eviction policy. A chunk that it names and that is gone
is a miss; one that it does not name is found by the listing that follows. Integers are little-endian:

======  ====  ==========================================================================================
offset  size  field
======  ====  ==========================================================================================
0       8     magic, ``4b 56 53 4e 41 50 01 0a`` ("KVSNAP", the format's version, a line feed)
8       16    namespace digest
24      8     number of chunks, n
32      8     1 where it was written by a store that closed, else 0
40      16 n  keys, the one to evict first in front
…       4 n   depth of each
…       4 n   size of each file, in blocks of 4096 bytes
…       2 n   the policy's number for each, 0 for none
…       16    XXH3-128 (canonical, big-endian) of everything before
======  ====  ==========================================================================================
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import xxhash

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.keys import KEY_BYTES, ChunkKey

FILE: Final = "index.snapshot"
MAX_STATE: Final = 2**16 - 1

_MAGIC: Final = b"KVSNAP\x01\n"
_HEADER = struct.Struct("<8s16sQQ")
_CHECK_BYTES: Final = 16
_ROW_BYTES: Final = KEY_BYTES + 4 + 4 + 2
# Encoded or read in pieces of this size, so that nobody waits long for the interpreter.
_PIECE: Final = 1 << 16


class Snapshot(msgspec.Struct):
    """Columns of equal length, coldest first; `states` may be empty, for all 0. `written_ns` is the file's time."""

    keys: Sequence[ChunkKey]
    depths: Sequence[int]
    blocks: Sequence[int]
    states: Sequence[int] = ()
    closed: bool = False
    written_ns: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def states_by_key(self) -> dict[ChunkKey, int]:
        """Those that are not 0."""
        return {key: state for key, state in zip(self.keys, self.states) if state}


def size_of(count: int) -> int:
    """Bytes of a snapshot of this many chunks."""
    return _HEADER.size + count * _ROW_BYTES + _CHECK_BYTES


def encode(snapshot: Snapshot, namespace: bytes) -> Iterator[bytes]:
    """The file's bytes, piece by piece: `size_of(len(snapshot))` in all."""
    check = xxhash.xxh3_128()
    header = _HEADER.pack(_MAGIC, namespace, len(snapshot), snapshot.closed)
    states = snapshot.states or [0] * len(snapshot)
    columns = (
        (b"".join(snapshot.keys[at : at + _PIECE]) for at in range(0, len(snapshot), _PIECE)),
        _integers("I", snapshot.depths),
        _integers("I", snapshot.blocks),
        (
            _little(array("H", [min(state, MAX_STATE) for state in states[at : at + _PIECE]]))
            for at in range(0, len(snapshot), _PIECE)
        ),
    )
    check.update(header)
    yield header
    for column in columns:
        for piece in column:
            check.update(piece)
            yield piece
    yield check.digest()


def _integers(code: str, values: Sequence[int]) -> Iterator[bytes]:
    for at in range(0, len(values), _PIECE):
        yield _little(array(code, values[at : at + _PIECE]))


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def read(directory: str, namespace: bytes) -> Snapshot | None:
    """A namespace's snapshot; None where it has none.

    Raises `OSError` where it cannot be read, and `ValueError` where it is damaged, of another namespace or of another
    version: nothing in it is used then.
    """
    try:
        fd = osio.open(f"{directory}/{FILE}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = osio.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < size_of(0):
            raise ValueError("not a snapshot")
        magic, digest, count, closed = _HEADER.unpack(osio.pread(fd, _HEADER.size, 0))
        if magic != _MAGIC or digest != namespace or found.st_size != size_of(count) or closed > 1:
            raise ValueError("of another version, another namespace or another length")
        data = bytearray(found.st_size)
        if osio.read_fully(fd, [memoryview(data)]) != len(data):
            raise ValueError("cut short")
    finally:
        osio.close_quietly(fd)
    view = memoryview(data)
    if xxhash.xxh3_128_digest(view[:-_CHECK_BYTES]) != view[-_CHECK_BYTES:]:
        raise ValueError("another checksum")
    return _decode(view[_HEADER.size : -_CHECK_BYTES], count, bool(closed), found.st_mtime_ns)


def _decode(rows: memoryview, count: int, closed: bool, written_ns: int) -> Snapshot:
    ends = [count * width for width in (KEY_BYTES, KEY_BYTES + 4, KEY_BYTES + 8, _ROW_BYTES)]
    keys = [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", rows[: ends[0]])]
    depths, blocks = (_column("I", rows[begin:end]) for begin, end in pairwise(ends[:3]))
    return Snapshot(keys, depths, blocks, _column("H", rows[ends[2] :]), closed, written_ns)


def _column(code: str, data: memoryview) -> array[int]:
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
