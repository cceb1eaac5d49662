"""The chunk file: what is written, and that nothing else is ever accepted."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import (
    CHUNK_FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD,
    aligned,
    chunk_path,
    disk_bytes,
    holds,
    open_store,
    payload_of,
    prefix,
    put,
    put_prefix,
)

from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Miss, MissCause, PutResult, codec
from lmcache_nvme_backend.store.format import chunk_name, parse_name, parse_names

KEY = prefix("format", 1)[0]


def stored_chunk(root: Path) -> tuple[ChunkStore, Path]:
    store = open_store(root)
    assert put(store, KEY, depth=3) is PutResult.STORED
    return store, chunk_path(store, KEY)


def miss_of(store: ChunkStore, key: ChunkKey = KEY, nbytes: int = PAYLOAD) -> MissCause:
    result = store.get(key, aligned(bytes(nbytes)))
    assert isinstance(result, Miss), "damaged bytes were accepted"
    return result.cause


def edit(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def seal_header(path: Path) -> None:
    """Give an edited header a right checksum, as a program with another idea of the format would."""
    edit(path, 88, xxhash.xxh3_128_digest(path.read_bytes()[:88]))


def test_the_file_is_laid_out_as_the_docstring_says(root):
    """Offsets, sizes and byte order of every field, read with nothing but struct."""
    with stored_chunk(root)[0] as store:
        data = chunk_path(store, KEY).read_bytes()
    assert len(data) == CHUNK_FILE == 4096 + 8192
    assert data[:8] == b"KVCHUNK\n"
    assert struct.unpack_from("<HBBI", data, 8) == (1, 0, 0, 3)
    assert struct.unpack_from("<QQII", data, 16) == (PAYLOAD, PAYLOAD, 256, 0)
    assert data[40:56] == KEY
    assert data[56:72].hex() == NAMESPACE.digest
    assert data[72:88] == xxhash.xxh3_128_digest(payload_of(KEY))
    assert data[88:104] == xxhash.xxh3_128_digest(data[:88])
    assert data[104:4096] == bytes(3992)
    assert data[4096 : 4096 + PAYLOAD] == payload_of(KEY)
    assert data[4096 + PAYLOAD :] == bytes(8192 - PAYLOAD)


def test_the_name_tells_key_depth_and_size(root):
    """Recovery needs neither open nor stat."""
    with stored_chunk(root)[0] as store:
        path = chunk_path(store, KEY)
    assert path.name == f"{KEY.hex()}-00000003-00000003.kv"
    assert path.parent.name == KEY.hex()[:2]
    assert path.parents[1].name == NAMESPACE.digest
    assert parse_name(path.name) == (KEY, 3, CHUNK_FILE // 4096)


@pytest.mark.parametrize(
    ("offset", "data", "cause"),
    [
        (0, b"KVCHUNK\r", MissCause.MAGIC),
        (8, b"\x02\x00", MissCause.VERSION),
        (10, b"\x07", MissCause.CODEC),
        (10, b"\x01", MissCause.CODEC),  # zstd, which this payload is not
        (10, b"\x02", MissCause.CODEC),  # zstd-split, which it is not either
        (11, b"\x01", MissCause.CODEC),
        (12, b"\x04", MissCause.NAME),
        (16, struct.pack("<Q", PAYLOAD - 4096), MissCause.LENGTH),
        (16, struct.pack("<Q", PAYLOAD - 1), MissCause.LENGTH),
        (16, struct.pack("<Q", 2**64 - 1), MissCause.LENGTH),
        (24, struct.pack("<Q", PAYLOAD + 1), MissCause.LENGTH),
        (36, b"\x01", MissCause.CODEC),
        (40, b"\x00" * 16, MissCause.KEY),
        (56, b"\x00" * 16, MissCause.NAMESPACE),
        (72, b"\x00" * 16, MissCause.PAYLOAD_CHECKSUM),
    ],
)
def test_a_well_formed_header_with_one_wrong_field_is_a_miss_by_its_cause(root, offset, data, cause):
    """Every field is compared with what is known from elsewhere, checksum or not; and the file goes."""
    store, path = stored_chunk(root)
    with store:
        edit(path, offset, data)
        seal_header(path)
        assert miss_of(store) is cause
        assert store.stats.misses[cause] == store.stats.corrupt[cause] == 1
        assert not path.exists()
        assert store.usage().used_bytes == 0
        assert miss_of(store) is MissCause.ABSENT


@pytest.mark.parametrize("size", [0, 1, 88, 4095, 4096, 4097, 8192, CHUNK_FILE - 1, CHUNK_FILE + 1, CHUNK_FILE + 4096])
def test_a_file_of_another_size_than_its_name_says_is_truncated(root, size):
    """Nothing of it is served, however much is left."""
    store, path = stored_chunk(root)
    with store:
        os.truncate(path, size)
        assert miss_of(store) is MissCause.TRUNCATED
        assert not path.exists()


@pytest.mark.parametrize("zeroed_from", [0, 4096, 8192])
def test_a_file_whose_tail_never_reached_the_disk_is_a_miss(root, zeroed_from):
    """A crash can leave a file at full length with zeroes from some block on."""
    store, path = stored_chunk(root)
    with store:
        edit(path, zeroed_from, bytes(CHUNK_FILE - zeroed_from))
        assert miss_of(store) is (MissCause.PAYLOAD_CHECKSUM if zeroed_from else MissCause.MAGIC)


def test_two_swapped_files_are_misses(root):
    """A chunk under another chunk's name is not served."""
    first, second = prefix("swapped", 2)
    with open_store(root) as store:
        put(store, first)
        put(store, second)
        a, b = chunk_path(store, first), chunk_path(store, second)
        a.rename(root / "aside")
        b.rename(a)
        (root / "aside").rename(b)
        assert [miss_of(store, key) for key in (first, second)] == [MissCause.KEY] * 2


def test_a_file_moved_to_another_namespace_is_a_miss(root):
    """Another model's bytes under this model's key are not served."""
    with open_store(root) as store, open_store(root, namespace=OTHER_NAMESPACE) as other:
        put(store, KEY)
        put(other, KEY)
        chunk_path(other, KEY).write_bytes(chunk_path(store, KEY).read_bytes())
        assert miss_of(other) is MissCause.NAMESPACE
        assert holds(store, KEY)


def test_a_renamed_file_is_a_miss(root):
    """The depth in the name orders evictions; a name that lies about it is not believed."""
    store, path = stored_chunk(root)
    store.close()
    path.rename(path.with_name(chunk_name(KEY, 0, CHUNK_FILE // 4096)))
    with open_store(root) as store:
        assert miss_of(store) is MissCause.NAME


def test_a_buffer_that_is_too_small_is_a_miss_and_leaves_the_chunk(root):
    """Another model's chunk size must not cost a good file; and no byte behind a larger buffer's payload is touched."""
    store, path = stored_chunk(root)
    with store:
        for nbytes in (0, 1, 4096, PAYLOAD - 1):
            assert miss_of(store, nbytes=nbytes) is MissCause.TOO_LARGE
        assert path.exists()
        buffer = aligned(b"\xaa" * 20000)
        assert not isinstance(store.get(KEY, buffer), Miss)
        assert buffer[:PAYLOAD] == payload_of(KEY) and buffer[PAYLOAD:] == b"\xaa" * (20000 - PAYLOAD)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 3 << 20, (3 << 20) + 17])
@pytest.mark.parametrize("codec", ["none", "zstd", "zstd-split"])
def test_payloads_of_any_length_come_back(root, nbytes, codec):
    """Whole blocks or not, empty or larger than a bounce buffer."""
    key = prefix("lengths", 1)[0]
    data = payload_of(key, nbytes)
    with open_store(root, quota_chunks=1000, codec=codec) as store:
        assert store.put(key, aligned(data), depth=0) is PutResult.STORED
        buffer = aligned(bytes(nbytes))
        assert not isinstance(store.get(key, buffer), Miss)
        assert buffer == data
        assert store.usage().used_bytes == disk_bytes(root)


NAMES = st.one_of(
    st.builds(chunk_name, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.sampled_from(["", ".kv", "x", "AB" * 16 + "-00000000-00000001.kv", " b" * 16 + "-00000000-00000001.kv"]),
    st.text(alphabet="ab-. k\u00e9v0A", min_size=53, max_size=53),
)


@given(st.lists(NAMES, max_size=6), st.booleans())
def test_a_listing_decoded_as_a_whole_gives_what_name_by_name_gives(names, same_shard):
    """The fast path of recovery accepts exactly what the slow one accepts."""
    if same_shard:
        names = ["ab" + name[2:] for name in names]
    chunks, strays = parse_names(names, "ab")
    good = [name for name in names if parse_name(name) is not None and name.startswith("ab")]
    assert list(chunks) == [parse_name(name) for name in good]
    assert strays == [name for name in names if name not in good]


def sixteen_bit(count: int, seed: int = 0) -> bytes:
    """Numbers as KV has them in bf16: a few exponents, noise in the mantissa."""
    rng = random.Random(seed)
    high = rng.choices(range(0x3B, 0x43), weights=(1, 2, 4, 8, 16, 8, 4, 2), k=count)
    return bytes(byte for pair in zip(rng.randbytes(count), high) for byte in pair)


def test_split_planes_shrink_sixteen_bit_numbers_more_than_one_frame(root):
    """Stored with codec 2 and less than 0.75 of their bytes; a whole frame needs more."""
    data = sixteen_bit(200_000)
    whole, split = prefix("planes", 2)
    sizes = {}
    for key, name in ((whole, "zstd"), (split, "zstd-split")):
        with open_store(root, quota_chunks=1000, codec=name) as store:
            store.put(key, aligned(data), depth=0)
            sizes[name] = chunk_path(store, key).stat().st_size
    with open_store(root, quota_chunks=1000) as store:
        assert chunk_path(store, split).read_bytes()[10] == 2
        for key in (whole, split):
            buffer = aligned(bytes(len(data)))
            assert not isinstance(store.get(key, buffer), Miss)
            assert buffer == data
    assert sizes["zstd-split"] < 0.75 * len(data) < sizes["zstd"]


def test_either_plane_is_stored_raw_where_compressing_it_does_not_pay(root):
    """The README's layout: two lengths, then the planes; one as long as the numbers are many is raw."""
    rng = random.Random(5)
    count = 100_000
    noise = rng.randbytes(count)
    for key, plane in zip(prefix("planes", 2), (0, 1)):  # which one is noise: the high plane, the low plane
        data = bytearray(2 * count)
        data[1 - plane :: 2] = noise
        with open_store(root, quota_chunks=1000, codec="zstd-split") as store:
            store.put(key, aligned(bytes(data)), depth=0)
            stored = chunk_path(store, key).read_bytes()[4096:]
            buffer = aligned(bytes(len(data)))
            assert not isinstance(store.get(key, buffer), Miss)
            assert buffer == data
        high, low = struct.unpack_from("<QQ", stored)
        assert (high == count, low == count) == (plane == 0, plane == 1)
        raw_at = 16 if plane == 0 else 16 + high
        assert stored[raw_at : raw_at + count] == noise


@given(st.binary(max_size=400), st.integers(0, 300))
def test_a_split_payload_of_anything_is_refused_without_an_exception(packed, numbers):
    """A header can be right and its payload nonsense: what is taken is the two planes of it, and nothing raises."""
    into = memoryview(bytearray(2 * numbers))
    made = struct.pack("<QQ", numbers, max(0, len(packed) - 16 - numbers)) + packed[16:]
    for data in (packed, made):
        if codec.decompress(2, memoryview(data), into):
            assert len(data) == 16 + 2 * numbers
            assert into[1::2].tobytes() + into[0::2].tobytes() == data[16:]


def test_chunks_of_all_codecs_live_side_by_side(root):
    """A chunk that compresses is smaller on disk, one that does not is stored raw, and either store reads both."""
    squeezable, noise = prefix("codec", 2)
    with open_store(root, codec="zstd") as store:
        store.put(squeezable, aligned(b"kv" * 50000), depth=0)
        store.put(noise, aligned(payload_of(noise)), depth=0, tokens=256)
        assert chunk_path(store, squeezable).stat().st_size == 8192
        assert chunk_path(store, noise).stat().st_size == CHUNK_FILE
        assert chunk_path(store, squeezable).read_bytes()[10] == 1 and chunk_path(store, noise).read_bytes()[10] == 0
    with open_store(root, codec="none") as store:
        buffer = aligned(bytes(100000))
        assert not isinstance(store.get(squeezable, buffer), Miss)
        assert buffer == b"kv" * 50000
        assert holds(store, noise)
        assert store.put(squeezable, buffer, depth=0) is PutResult.EXISTS
        assert isinstance(store.get(squeezable, aligned(bytes(99999))), Miss)


@pytest.mark.parametrize("raw_bytes", [99_998, 99_999, 100_001, 100_002])
@pytest.mark.parametrize("codec", ["zstd", "zstd-split"])
def test_a_compressed_chunk_of_another_raw_length_is_a_miss(root, raw_bytes, codec):
    """The header's raw length and the frame have to agree."""
    with open_store(root, codec=codec) as store:
        store.put(KEY, aligned(b"kv" * 50000), depth=0)
        path = chunk_path(store, KEY)
        edit(path, 24, struct.pack("<Q", raw_bytes))
        seal_header(path)
        assert miss_of(store, nbytes=200_000) is MissCause.CODEC


def test_a_prefix_is_matched_up_to_its_first_missing_chunk(root):
    """What lies behind a gap cannot be used."""
    keys = prefix("gap", 6)
    with open_store(root) as store:
        put_prefix(store, keys)
        assert store.match(keys) == 6
        assert store.remove(keys[3])
        assert store.match(keys) == 3
        assert store.match([]) == 0
        assert not store.contains(keys[3]) and store.contains(keys[4])
        assert not store.remove(keys[3])
