"""Chunk keys: fixed-size digests of the fields that name a chunk."""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType

# 16 bytes. Opaque to the store; equal keys in one namespace mean equal bytes.
ChunkKey = NewType("ChunkKey", bytes)

KEY_BYTES = 16


def digest_fields(*fields: str | int | bytes) -> ChunkKey:
    """A key for a tuple of fields; different tuples give different input to the hash.

    Every field goes in as a type tag, its length in 8 bytes and its bytes, so that neither a separator inside a field
    nor moving a character from one field to the next can make two tuples meet. BLAKE2b rather than a checksum:
    parts of a key (model names, tags, salts) come from requests, and nobody may be able to construct a collision.

    Raises `TypeError` for any other type, including bool (True and 1 would be one key).
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for field in fields:
        if isinstance(field, str):
            tag, data = b"s", field.encode("utf-8", "surrogatepass")
        elif isinstance(field, bool):
            raise TypeError("a key field is str, int or bytes, not bool")
        elif isinstance(field, int):
            tag, data = b"i", b"%d" % field
        elif isinstance(field, bytes):
            tag, data = b"b", field
        else:
            raise TypeError(f"a key field is str, int or bytes, not {type(field).__name__}")
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return ChunkKey(digest.digest())
