"""Every bit of a chunk file, flipped."""

from __future__ import annotations

import os

import pytest

from lmcache_nvme_backend.store import Hit, MissCause
from lmcache_nvme_backend.store.format import BLOCK, HEADER_BYTES
from tests.unit.store.store_helpers import PAYLOAD, aligned, chunk_path, open_store, payload_of, prefix

KEY = prefix("flipped", 1)[0]


def compressible(nbytes):
    """Half noise, half its repetition."""
    half = payload_of(KEY, nbytes // 2)
    return half + half


@pytest.mark.parametrize(("codec", "payload"), [("none", payload_of(KEY)), ("zstd", compressible(PAYLOAD))])
def test_every_flipped_bit_of_header_and_payload_is_found(fast_root, codec, payload):
    """All of them, one by one. Only the zero bytes behind the payload are free, and what is served is right all the
    same. The reader alone is asked, since the store would remove the file."""
    with open_store(fast_root, codec=codec) as store:
        assert store.put(KEY, aligned(payload), depth=3, tokens=256).kept
        path, entry = chunk_path(store, KEY), store._index.get(KEY)
        good = path.read_bytes()
        stored = int.from_bytes(good[16:24], "little")
        assert (stored < len(payload)) == (codec == "zstd")
        into, flipped, found = aligned(bytes(len(payload))), 0, dict.fromkeys(MissCause, 0)
        fd = os.open(path, os.O_WRONLY)
        for offset in range(len(good)):
            # Of the header's zero bytes each bit once is enough, with one codec or the other.
            for bit in range(8) if codec == "none" or not HEADER_BYTES <= offset < BLOCK else (offset % 8,):
                os.pwrite(fd, bytes([good[offset] ^ 1 << bit]), offset)
                result = store._reader.read(KEY, entry, into).result
                if offset < BLOCK + stored:
                    assert not isinstance(result, Hit), f"bit {bit} of byte {offset}"
                    assert result.cause.corrupt
                    found[result.cause] += 1
                    flipped += 1
                else:
                    assert result == Hit(len(payload), 256) and into == payload
            os.pwrite(fd, good[offset : offset + 1], offset)
        os.close(fd)
        assert sum(found.values()) == flipped >= 8 * (HEADER_BYTES + stored)
        assert found[MissCause.PAYLOAD_CHECKSUM] == 8 * stored
        assert found[MissCause.MAGIC] == 64 and found[MissCause.VERSION] == 16
        assert found[MissCause.HEADER_CHECKSUM] >= 8 * (HEADER_BYTES - 10)
        assert store._reader.read(KEY, entry, into).result == Hit(len(payload), 256)


def test_a_flipped_chunk_is_removed_and_stored_again(fast_root):
    """What the reader finds, the store acts on."""
    with open_store(fast_root) as store:
        for offset in (0, 20, 90, 4000, BLOCK, BLOCK + PAYLOAD - 1):
            assert store.put(KEY, aligned(payload_of(KEY)), depth=0).kept
            path = chunk_path(store, KEY)
            data = bytearray(path.read_bytes())
            data[offset] ^= 0x20
            path.write_bytes(data)
            into = aligned(bytes(PAYLOAD))
            assert store.get(KEY, into).cause.corrupt and not path.exists()
            assert store.usage().used_bytes == 0
