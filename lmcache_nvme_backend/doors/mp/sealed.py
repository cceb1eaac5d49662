"""A chunk as it lies in a store that several hosts share: its bytes and, behind them, a seal that proves them.

Nothing that comes over a network is believed: a seal names the chunk and its namespace and carries a checksum, so what
was cut short, overwritten or stored under another name is a miss. The seal, little-endian, 72 bytes behind the payload:

======  ====  =====================================================
offset  size  field
======  ====  =====================================================
0       8     magic, ``KVSEAL01``
8       8     payload length
16      16    the chunk's key
32      16    the namespace's digest
48      8     zero
56      16    XXH3-128 (canonical) of the payload and bytes 0 to 55
======  ====  =====================================================

It proves that these are the bytes that some host sealed under this name. That the host computed them rightly, nobody
can see; the name says with which weights and settings.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from lmcache_nvme_backend.store import ChunkKey

_FIELDS = struct.Struct("<8sQ16s16s8x")
_CHECKSUM_BYTES: Final = 16
_MAGIC: Final = b"KVSEAL01"
SEAL_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES


def is_whole(sealed: memoryview, key: ChunkKey, namespace: bytes) -> bool:
    """Whether this is what was sealed under that name, every byte of it."""
    return bytes(sealed[-SEAL_BYTES:]) == seal_of(sealed[:-SEAL_BYTES], key, namespace)


def seal_of(payload: memoryview, key: ChunkKey, namespace: bytes) -> bytes:
    """The seal of a payload, to lie right behind it."""
    fields = _FIELDS.pack(_MAGIC, len(payload), key, namespace)
    digest = xxhash.xxh3_128(payload)
    digest.update(fields)
    return fields + digest.digest()
