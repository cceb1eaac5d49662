"""Any sequence of operations against a model: a dictionary, a quota and the pins."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_helpers import (
    NAMESPACE,
    OTHER_NAMESPACE,
    aligned,
    chunk_path,
    disk_bytes,
    session_files,
    temporaries,
)

from lmcache_nvme_backend.store import ChunkStore, Hit, Miss, MissCause, PutResult, StoreSettings, digest_fields
from lmcache_nvme_backend.store.format import BLOCK, blocks_of

QUOTA = 12 * BLOCK
PREFIXES = {name: [digest_fields(name, depth) for depth in range(4)] for name in "abc"}
CHUNKS = st.tuples(st.sampled_from("abc"), st.integers(0, 3))
STORES = st.sampled_from([0, 1])


class StoreMachine(RuleBasedStateMachine):
    """Two stores of two namespaces under one root, and one quota."""

    @initialize(codec=st.sampled_from(["none", "zstd", "zstd-split"]), direct_io=st.sampled_from(["auto", "off"]))
    def open_both(self, codec, direct_io):
        self.root = Path(tempfile.mkdtemp())
        self.settings = StoreSettings(quota_bytes=QUOTA, codec=codec, direct_io=direct_io)
        self.stores = [self.opened(0), self.opened(1)]
        self.model = [{}, {}]  # what was stored and has not been removed; eviction may have taken some
        self.pins = [{}, {}]
        self.damaged = [set(), set()]

    def opened(self, which):
        return ChunkStore.open(self.root, (NAMESPACE, OTHER_NAMESPACE)[which], self.settings)

    def teardown(self):
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            assert session_files(self.root) == [] and temporaries(self.root) == []
            shutil.rmtree(self.root)

    def evictions(self):
        return sum(store.stats.evictions for store in self.stores)

    @rule(which=STORES, chunk=CHUNKS, data=st.binary(max_size=2 * BLOCK), repeat=st.sampled_from([1, 1, 700]))
    def put(self, which, chunk, data, repeat):
        name, depth = chunk
        data = (data * repeat)[: 5 * BLOCK]
        store, keys = self.stores[which], PREFIXES[name]
        used, evicted = store.usage().used_bytes, self.evictions()
        present = keys[depth] in store._index and keys[depth] in self.on_disk(which)
        result = store.put(
            keys[depth], aligned(data), depth=depth, parent=keys[depth - 1] if depth else None, tokens=len(data)
        )
        if present:
            assert result is PutResult.EXISTS
        else:
            assert result in (PutResult.STORED, PutResult.QUOTA)
            self.damaged[which].discard(keys[depth])
            self.model[which].pop(keys[depth], None)
            if result is PutResult.STORED:
                self.model[which][keys[depth]] = data
            worst = blocks_of(len(data)) * BLOCK
            if used + worst <= QUOTA:
                assert result is PutResult.STORED and self.evictions() == evicted, "no eviction without need"

    @rule(which=STORES, chunk=CHUNKS, room=st.sampled_from([0, BLOCK, 5 * BLOCK, 6 * BLOCK]))
    def get(self, which, chunk, room):
        key = PREFIXES[chunk[0]][chunk[1]]
        store, expected = self.stores[which], self.model[which].get(key)
        into = aligned(bytes(room))
        result = store.get(key, into)
        if isinstance(result, Hit):
            assert key not in self.damaged[which]
            assert expected is not None and into[: result.nbytes] == expected
            assert result == Hit(len(expected), len(expected))
        elif result.cause is MissCause.TOO_LARGE:
            assert key in self.damaged[which] or (expected is not None and len(expected) > room)
        elif result.cause is not MissCause.ABSENT:
            assert key in self.damaged[which]
            self.model[which].pop(key, None)
            self.damaged[which].discard(key)

    @rule(which=STORES, name=st.sampled_from("abc"), pin=st.booleans())
    def match(self, which, name, pin):
        keys = PREFIXES[name]
        count = self.stores[which].match(keys, pin=pin)
        assert set(keys[:count]) <= set(self.model[which])
        if pin:
            for key in keys[:count]:
                self.pins[which][key] = self.pins[which].get(key, 0) + 1

    @rule(which=STORES, chunk=CHUNKS)
    def unpin(self, which, chunk):
        key = PREFIXES[chunk[0]][chunk[1]]
        pins = self.pins[which].pop(key, 0)
        assert self.stores[which].unpin(key) == (pins > 0)
        if pins > 1:
            self.pins[which][key] = pins - 1

    @rule(which=STORES, chunk=CHUNKS)
    def remove(self, which, chunk):
        key = PREFIXES[chunk[0]][chunk[1]]
        there = key in self.on_disk(which) and key in self.stores[which]._index
        assert self.stores[which].remove(key) == there
        self.model[which].pop(key, None)
        self.damaged[which].discard(key)

    @rule(which=STORES)
    def clear(self, which):
        self.stores[which].clear()
        assert self.on_disk(which) == set()
        self.model[which].clear()
        self.damaged[which].clear()

    @precondition(lambda self: any(self.model))
    @rule(which=STORES, chunk=CHUNKS, offset=st.integers(0, 4 * BLOCK), shorten=st.booleans())
    def damage(self, which, chunk, offset, shorten):
        key = PREFIXES[chunk[0]][chunk[1]]
        if key not in self.on_disk(which) or key not in self.model[which]:
            return
        path = chunk_path(self.stores[which], key)
        data = bytearray(path.read_bytes())
        payload_ends = BLOCK + int.from_bytes(data[16:24], "little")
        if shorten:
            # The account goes by the name, and the disk by the file: keep them comparable.
            data[8] ^= 0xFF
        else:
            data[min(offset, payload_ends - 1)] ^= 0x10
        path.write_bytes(data)
        self.damaged[which].add(key)

    @rule(which=STORES, upkeep=st.booleans())
    def reopen(self, which, upkeep):
        if upkeep:
            self.stores[which]._upkeep._flush(100)
        before = self.on_disk(which)
        self.stores[which].close()
        self.stores[which] = self.opened(which)
        self.pins[which].clear()
        assert set(self.stores[which]._index.all_keys()) == before == self.on_disk(which)

    def on_disk(self, which):
        directory = self.root / "v1" / (NAMESPACE, OTHER_NAMESPACE)[which].digest
        return {bytes.fromhex(path.name[:32]) for path in directory.rglob("*.kv")}

    @invariant()
    def quota_and_account_hold(self):
        if not hasattr(self, "stores"):
            return
        used = disk_bytes(self.root)
        for which, store in enumerate(self.stores):
            usage = store.usage()
            assert usage.used_bytes == used <= QUOTA
            assert usage.reserved_bytes == 0
            assert self.on_disk(which) <= set(store._index.all_keys()), "a chunk on disk that nobody finds"
            assert self.on_disk(which) <= set(self.model[which])
        assert temporaries(self.root) == []

    @invariant()
    def no_pinned_chunk_is_evicted_by_its_own_store(self):
        if not hasattr(self, "stores"):
            return
        for which, store in enumerate(self.stores):
            for key in self.pins[which]:
                if key in self.model[which] and key not in store._index:
                    # It was taken by the other store or removed as damaged, never by this one's policy.
                    assert key not in self.on_disk(which)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_single_store_never_evicts_a_pinned_chunk(root):
    """The machine's stores can take from each other; here nobody else is there."""
    keys = PREFIXES["a"]
    with ChunkStore.open(root, NAMESPACE, StoreSettings(quota_bytes=4 * BLOCK)) as store:
        for depth in range(2):
            assert store.put(keys[depth], aligned(b"x"), depth=depth) is PutResult.STORED
        assert store.match(keys, pin=True) == 2
        for name in "bc":
            assert store.put(PREFIXES[name][0], aligned(b"y"), depth=0) is PutResult.QUOTA
        assert isinstance(store.get(PREFIXES["b"][0], aligned(b"z")), Miss)
        assert store.match(keys) == 2
