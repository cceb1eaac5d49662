"""Stores: what does not fit is dropped and counted, and a prefix that lost a chunk gets no more of them."""

import threading

import pytest
import torch

from lmcache_nvme_backend.doors import lmcache_backend
from lmcache_nvme_backend.store import ChunkStore, PutResult
from lmcache_nvme_backend.store import store as store_module

from .conftest import CHUNK, PagedKv, prompt


def dropped(one):
    return {cause: count for cause, count in one.backend.saver.dropped.snapshot().items() if count}


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing until it is let go."""
    gate, real = threading.Event(), ChunkStore.put
    monkeypatch.setattr(ChunkStore, "put", lambda self, *a, **kw: gate.wait(60) and real(self, *a, **kw))
    yield gate
    gate.set()


def test_a_step_that_stores_more_than_the_ring_holds_works(lmcache):
    """Chunks pass through the ring: a slot is written behind while the next one is filled."""
    one = lmcache(staging_mib=1, store_wait_ms=30_000)
    tokens = prompt(5 * one.backend._slots * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    assert dropped(one) == {}
    assert one.lookup(tokens) == len(tokens)
    assert one.retrieve(tokens, kv) == len(tokens)
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_what_the_disk_does_not_take_in_time_is_dropped_and_counted(lmcache, disk):
    """The step's bound is the bound; the head of the prefix is what is kept."""
    one = lmcache(staging_mib=1, store_wait_ms=0)
    slots = one.backend._slots
    tokens = prompt((slots + 5) * CHUNK)
    one.store(tokens, PagedKv(len(tokens)))
    disk.set()
    one.settle()
    assert sum(dropped(one).values()) == 5 and dropped(one)["staging full"] == 1
    assert one.lookup(tokens) == slots * CHUNK
    assert one.backend.store.usage().namespace_chunks == slots


def test_a_prefix_that_lost_a_chunk_is_refused_in_later_steps_too(lmcache, disk):
    """LMCache counts tokens as saved whether or not they were: the rest of that request would hang in the air."""
    one = lmcache(staging_mib=1, store_wait_ms=0)
    slots = one.backend._slots
    tokens = prompt((slots + 8) * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens[: (slots + 2) * CHUNK], kv, request="long")
    disk.set()
    one.settle()
    one.store(tokens, kv, skip=(slots + 2) * CHUNK, request="long")
    one.settle()
    assert sum(dropped(one).values()) == 8
    assert one.backend.store.usage().namespace_chunks == slots
    one.store(prompt(CHUNK, seed=5), PagedKv(CHUNK), request="another")
    one.settle()
    assert one.backend.store.usage().namespace_chunks == slots + 1


def test_a_failed_write_takes_the_rest_of_its_prefix_with_it(lmcache, monkeypatch):
    """A chunk behind a lost one would never be found: it is not kept."""
    one = lmcache()
    tokens = prompt(6 * CHUNK)
    kv = PagedKv(len(tokens))
    real, calls, lock = ChunkStore.put, [], threading.Lock()

    def failing(self, key, payload, **kw):
        with lock:
            calls.append(kw["depth"])
        return PutResult.IO_ERROR if kw["depth"] == 2 else real(self, key, payload, **kw)

    monkeypatch.setattr(ChunkStore, "put", failing)
    one.store(tokens, kv, request="x")
    one.settle()
    monkeypatch.undo()
    assert dropped(one)["io error"] == 1
    assert one.lookup(tokens) == 2 * CHUNK
    assert one.backend.store.usage().namespace_chunks <= 3


def test_a_full_ring_is_waited_for_within_the_bound(lmcache, disk):
    """A step waits for the drive rather than dropping, up to nvme.store_wait_ms."""
    one = lmcache(staging_mib=1, store_wait_ms=20_000)
    first = prompt(one.backend._slots * CHUNK)
    one.store(first, PagedKv(len(first)), request="a")
    assert one.backend._allocator.ring.free == 0
    threading.Timer(0.3, disk.set).start()
    second = prompt(2 * CHUNK, seed=3)
    one.store(second, PagedKv(len(second)), request="b")
    one.settle()
    assert dropped(one) == {}
    assert one.backend.saver.waited_s > 0


def test_the_bound_is_a_steps_not_a_chunks(lmcache, disk):
    """However many stores a step makes, they wait nvme.store_wait_ms in all."""
    one = lmcache(staging_mib=1, store_wait_ms=100)
    first = prompt(one.backend._slots * CHUNK)
    one.store(first, PagedKv(len(first)), request="a")
    with one.backend.saving_step():
        for i in range(20):
            one.store(prompt(CHUNK, seed=10 + i), PagedKv(CHUNK), request=f"b{i}", step=False)
    waited = one.backend.saver._waited_in_step_s
    disk.set()
    one.settle()
    assert 0.1 <= waited < 1.0
    assert dropped(one) == {"staging full": 20}


def test_a_chunk_that_is_there_is_not_written_again(lmcache):
    """Two requests with one prefix write it once."""
    one = lmcache()
    tokens = prompt(3 * CHUNK)
    for request in ("a", "b"):
        one.store(tokens, PagedKv(len(tokens)), request=request)
        one.settle()
    assert one.backend.store.stats.stores == 3
    assert dropped(one) == {}


def test_each_chunk_is_reported_when_it_is_on_disk(lmcache):
    """The completion callback comes once a key, after the chunk can be found; what it raises harms nobody."""
    one = lmcache()
    tokens = prompt(2 * CHUNK)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    found = []

    def done(key):
        found.append((key, one.backend.contains(key)))
        raise RuntimeError("the callback's own trouble")

    objs = [one.backend.allocate(one.backend.metadata.get_shapes(), one.backend.metadata.get_dtypes()) for _ in keys]
    for obj in objs:
        obj.tensor.view(torch.uint8).fill_(7)
    futures = one.backend.batched_submit_put_task(keys, objs, on_complete_callback=done)
    for obj in objs:
        obj.ref_count_down()
    for future in futures:
        future.result(30)
    assert sorted(found, key=lambda pair: keys.index(pair[0])) == [(key, True) for key in keys]
    assert not one.backend.exists_in_put_tasks(keys[0])


def test_a_connector_that_raises_in_mid_store_leaks_no_slot(lmcache, monkeypatch):
    """LMCache's store has no finally: the objects give their slots back by themselves."""
    one = lmcache()
    real = one.engine.gpu_connector.from_gpu

    def third_fails(obj, start, end, **kw):
        if start == 2 * CHUNK:
            raise RuntimeError("device lost")
        return real(obj, start, end, **kw)

    monkeypatch.setattr(one.engine.gpu_connector, "from_gpu", third_fails)
    tokens = prompt(5 * CHUNK)
    with pytest.raises(RuntimeError, match="device lost"):
        one.store(tokens, PagedKv(len(tokens)))
    monkeypatch.undo()
    import gc

    gc.collect()
    one.settle()  # the chunk before had been handed over already
    assert one.backend._allocator.ring.free == one.backend._allocator.ring.slots


def test_close_abandons_what_the_disk_does_not_finish(lmcache, disk, monkeypatch):
    """Shutdown is bounded, whatever the drive does; afterwards nothing is found and nothing is stored."""
    monkeypatch.setattr(lmcache_backend, "CLOSE_WAIT_S", 0.2)
    monkeypatch.setattr(store_module, "CLOSE_WAIT_S", 0.2)
    one = lmcache()
    tokens = prompt(8 * CHUNK)
    one.store(tokens, PagedKv(len(tokens)))
    one.backend.close()
    one.backend.close()
    assert one.lookup(tokens) == 0
    disk.set()
    one.settle()


def test_a_key_that_changes_between_copy_and_put_is_never_stored(lmcache):
    """Streamed bytes are written under the key they were announced for, or not at all."""
    one = lmcache()
    tokens = prompt(2 * CHUNK)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    real = one.engine.storage_manager.batched_put
    one.engine.storage_manager.batched_put = lambda ks, objs, **kw: real([*ks[1:], ks[0]], objs, **kw)
    one.store(tokens, PagedKv(len(tokens)))
    one.settle()
    stored = [one.backend.contains(key) for key in keys]
    assert not stored[1]
    assert dropped(one) == {"key changed": 1}
