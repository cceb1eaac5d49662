"""The chunk file and its name, byte by byte.

A file is a header block of 4096 bytes, the payload, and zero bytes up to the next multiple of 4096 (the largest
logical block of common drives, so that O_DIRECT works on all of them). Integers are little-endian.

======  ====  ==========================================================================================
offset  size  field
======  ====  ==========================================================================================
0       8     magic, ``4b 56 43 48 55 4e 4b 0a`` ("KVCHUNK" and a line feed)
8       2     format version, 1
10      1     codec of the payload: 0 none, 1 zstd, 2 zstd-split (see `codec`)
11      1     flags, 0; a reader refuses what it does not know
12      4     depth: number of chunks before this one in its prefix
16      8     payload length: bytes stored after the header block, without padding
24      8     raw length: bytes after decompression; equal to payload length where codec is 0
32      4     tokens the chunk stands for
36      4     zero
40      16    key
56      16    namespace digest
72      16    XXH3-128 (canonical, big-endian) of the stored payload
88      16    XXH3-128 (canonical, big-endian) of bytes 0 to 87
104     3992  zero
4096    …     payload, then zero bytes up to a multiple of 4096
======  ====  ==========================================================================================

The name is ``<key>-<depth>-<blocks>.kv``: 32, 8 and 8 lower-case hexadecimal digits, where `blocks` is the file's size
in units of 4096 bytes. The file lies in the directory named by the key's first two digits. So key, depth and size of
every chunk are known from a listing alone. A reader accepts a file only where name, size, header and payload agree.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from lmcache_nvme_backend.store.keys import ChunkKey
from lmcache_nvme_backend.store.results import MissCause

BLOCK: Final = 4096
FORMAT_VERSION: Final = 1
MAGIC: Final = b"KVCHUNK\n"
CODEC_NONE: Final = 0
CODEC_ZSTD: Final = 1
CODEC_ZSTD_SPLIT: Final = 2
SUFFIX: Final = ".kv"
MAX_UINT32: Final = 2**32 - 1

_FIELDS = struct.Struct("<8sHBBIQQII16s16s16s")
_CHECKSUM_BYTES = 16
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES
_REST = bytes(BLOCK - HEADER_BYTES)
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})-([0-9a-f]{8})\.kv")
_NAME_CHARS = 32 + 1 + 8 + 1 + 8 + len(SUFFIX)
_RECORD = struct.Struct(">16sII")


def checksum(data: memoryview | bytes) -> bytes:
    """XXH3-128, 16 bytes. Guards against accidents of disks and crashes, not against a person who can write here."""
    return xxhash.xxh3_128_digest(data)


def blocks_of(payload_bytes: int) -> int:
    """File size, in blocks, of a chunk whose stored payload has this many bytes."""
    return 1 + -(-payload_bytes // BLOCK)


class Header(msgspec.Struct, frozen=True):
    key: bytes
    namespace: bytes
    depth: int
    tokens: int
    codec: int
    payload_bytes: int
    raw_bytes: int
    payload_checksum: bytes

    def pack_into(self, block: memoryview) -> None:
        """Write the header into a zeroed or recycled block of 4096 bytes."""
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, self.codec, 0, self.depth, self.payload_bytes, self.raw_bytes, self.tokens, 0,
            self.key, self.namespace, self.payload_checksum,
        )  # fmt: skip
        block[: _FIELDS.size] = fields
        block[_FIELDS.size : HEADER_BYTES] = checksum(fields)
        block[HEADER_BYTES:BLOCK] = _REST


def parse_header(block: memoryview, key: bytes, namespace: bytes, depth: int, blocks: int) -> Header | MissCause:
    """The header of a file with this name, or the first thing that is wrong with it.

    Magic and version come before the checksum, since another version may lay the rest out differently.
    """
    (magic, version, codec, flags, depth_found, payload_bytes, raw_bytes, tokens, reserved,
     key_found, namespace_found, payload_checksum) = _FIELDS.unpack_from(block)  # fmt: skip
    if magic != MAGIC:
        return MissCause.MAGIC
    if version != FORMAT_VERSION:
        return MissCause.VERSION
    if checksum(block[: _FIELDS.size]) != block[_FIELDS.size : HEADER_BYTES] or bytes(block[HEADER_BYTES:]) != _REST:
        return MissCause.HEADER_CHECKSUM
    if codec not in (CODEC_NONE, CODEC_ZSTD, CODEC_ZSTD_SPLIT) or flags or reserved:
        return MissCause.CODEC
    if key_found != key:
        return MissCause.KEY
    if namespace_found != namespace:
        return MissCause.NAMESPACE
    if depth_found != depth:
        return MissCause.NAME
    if blocks_of(payload_bytes) != blocks or (codec == CODEC_NONE and raw_bytes != payload_bytes):
        return MissCause.LENGTH
    return Header(key_found, namespace_found, depth_found, tokens, codec, payload_bytes, raw_bytes, payload_checksum)


def chunk_name(key: bytes, depth: int, blocks: int) -> str:
    return f"{key.hex()}-{depth:08x}-{blocks:08x}{SUFFIX}"


def parse_name(name: str) -> tuple[ChunkKey, int, int] | None:
    """(key, depth, blocks), or None where this is not a chunk's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, depth, blocks = match.groups()
    return ChunkKey(bytes.fromhex(key)), int(depth, 16), int(blocks, 16)


def parse_names(names: list[str], shard: str) -> tuple[Iterator[tuple[ChunkKey, int, int]], list[str]]:
    """The chunks of a listing of one shard (a two-digit directory), and the names that are not chunks of it.

    A clean listing is decoded as a whole, some ten times as fast as name by name: this is most of the start-up time of
    a store with a million chunks.
    """
    count = len(names)
    joined = "".join(names)
    if (
        len(joined) == count * _NAME_CHARS
        and joined[0::_NAME_CHARS] == shard[0] * count
        and joined[1::_NAME_CHARS] == shard[1] * count
        and joined[32::_NAME_CHARS] == joined[41::_NAME_CHARS] == "-" * count
        and all(joined[50 + i :: _NAME_CHARS] == c * count for i, c in enumerate(SUFFIX))
        and joined.lower() == joined
    ):
        try:
            packed = bytes.fromhex(joined.replace("-", "").replace(SUFFIX, ""))
        except ValueError:
            packed = b""
        if len(packed) == count * _RECORD.size:
            return _RECORD.iter_unpack(packed), []
    chunks, strays = [], []
    for name in names:
        parsed = parse_name(name)
        if parsed is None or not name.startswith(shard):
            strays.append(name)
        else:
            chunks.append(parsed)
    return iter(chunks), strays
