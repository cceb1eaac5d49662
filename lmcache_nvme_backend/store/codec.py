"""Compression of payloads, chunk by chunk, where it pays.

Two codecs. *zstd* is one frame of the whole payload. *zstd-split* is for payloads of 16-bit numbers: their high bytes
(sign and exponent) take few values and shrink to about a third, their low bytes (mantissa) are noise. Apart, the high
bytes are entropy-coded alone and the low ones stay as they are. On KV of a small Llama in bf16 it saves 32 % where the
whole payload saves 22 %, and both ways are no slower, since half of the bytes are only copied.

A split payload, integers little-endian::

    0   8   bytes of the high plane as stored
    8   8   bytes of the low plane as stored
    16  …   the high plane, then the low plane

A plane stored with fewer bytes than it has numbers is a zstd frame, else it is raw.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import zstandard

from lmcache_nvme_backend.store.format import CODEC_NONE, CODEC_ZSTD, CODEC_ZSTD_SPLIT

# Level 1: on KV in bf16 higher levels gain under 2 % and cost several times the CPU time.
LEVEL: Final = 1
# Saves at least this share, or the chunk is stored raw: decompression on every load has to be earned.
MIN_SAVING: Final = 0.05
# Whether a low plane shrinks shows in its beginning.
_SAMPLE: Final = 1 << 16

_LENGTHS = struct.Struct("<QQ")
_local = threading.local()


def compress(raw: memoryview, split: bool) -> tuple[int, memoryview]:
    """(codec, what is to be stored): the payload itself under `CODEC_NONE` where compression does not pay."""
    codec, packed = CODEC_ZSTD, b""
    if split and len(raw) and len(raw) % 2 == 0:
        codec, packed = CODEC_ZSTD_SPLIT, _split(raw)
    else:
        packed = _compressor("whole").compress(raw)
    if len(packed) <= len(raw) * (1 - MIN_SAVING):
        return codec, memoryview(packed)
    return CODEC_NONE, raw


def decompress(codec: int, packed: memoryview, into: memoryview) -> bool:
    """Fill `into` exactly; False where the data are not a payload of that many bytes. Never raises on bad data."""
    if codec == CODEC_ZSTD:
        return _inflate(packed, into)
    return codec == CODEC_ZSTD_SPLIT and _join(packed, into)


def _compressor(kind: str) -> zstandard.ZstdCompressor:
    """One a thread: a compressor is not to be shared."""
    found: zstandard.ZstdCompressor | None = getattr(_local, kind, None)
    if found is None:
        if kind == "whole":
            found = zstandard.ZstdCompressor(level=LEVEL)
        else:
            # A plane has no repeats worth looking for: the smallest table, the longest match, and entropy coding does
            # the rest. Twice as fast as level 1, and no larger.
            found = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters.from_level(
                    LEVEL, strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7
                )
            )
        setattr(_local, kind, found)
    return found


def _split(raw: memoryview) -> bytes:
    import numpy as np  # only here: whoever stores uncompressed does not load it

    words = np.frombuffer(raw, dtype="<u2")
    high = _plane((words >> 8).astype(np.uint8).data)
    low = _plane(words.astype(np.uint8).data)
    return b"".join((_LENGTHS.pack(len(high), len(low)), high, low))


def _plane(plane: memoryview) -> bytes | memoryview:
    """As a frame where that pays, as far as its beginning can tell."""
    compressor = _compressor("plane")
    sample = plane[:_SAMPLE]
    if len(compressor.compress(sample)) > len(sample) * (1 - MIN_SAVING):
        return plane
    packed: bytes = compressor.compress(plane)
    return packed if len(packed) < len(plane) else plane


def _join(packed: memoryview, into: memoryview) -> bool:
    import numpy as np

    if len(packed) < _LENGTHS.size or len(into) % 2:
        return False
    lengths = _LENGTHS.unpack_from(packed)
    if _LENGTHS.size + sum(lengths) != len(packed):
        return False
    count = len(into) // 2
    planes = []
    at = _LENGTHS.size
    for length in lengths:
        stored = packed[at : at + length]
        at += length
        if length > count:
            return False
        if length < count:
            plane = memoryview(bytearray(count))
            if not _inflate(stored, plane):
                return False
            stored = plane
        planes.append(np.frombuffer(stored, dtype=np.uint8))
    words = np.frombuffer(into, dtype="<u2")
    words[:] = planes[0]
    words <<= 8
    words |= planes[1]
    return True


def _inflate(packed: memoryview, into: memoryview) -> bool:
    reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=False)
    try:
        done = 0
        while done < len(into):
            got = reader.readinto(into[done:])
            if got == 0:
                return False
            done += got
        return len(reader.read(1)) == 0
    except zstandard.ZstdError:
        return False
