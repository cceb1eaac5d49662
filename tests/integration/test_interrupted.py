"""Streams that end in the middle, by a raising connector, a shutdown, a cancelled request: every slot comes back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from .conftest import CHUNK, PagedKv, prompt


def stored(lmcache, chunks=8, **settings):
    """An engine with one prompt on disk."""
    one = lmcache(store_wait_ms=30_000, **settings)
    tokens, kv = prompt(chunks * CHUNK), PagedKv(chunks * CHUNK)
    one.store(tokens, kv)
    one.settle()
    assert one.lookup(tokens) == len(tokens)
    return one, tokens, kv


def slots_and_pins(one) -> tuple[int, int]:
    """(slots on loan, chunks pinned), once what nobody refers to is gone and reads that were under way have ended."""
    gc.collect()
    ring = one.backend._allocator.ring
    deadline = time.monotonic() + 20
    while ring.free < ring.slots and time.monotonic() < deadline:
        time.sleep(0.002)
    return ring.slots - ring.free, len(one.backend.store._index._pins)


def during(one, monkeypatch, chunk: int, act) -> None:
    """Call `act` when the connector is about to copy the prompt's `chunk`."""
    real = one.engine.gpu_connector.to_gpu

    def to_gpu(obj, start, end, **kw):
        if start == chunk * CHUNK:
            act()
        return real(obj, start, end, **kw)

    monkeypatch.setattr(one.engine.gpu_connector, "to_gpu", to_gpu)


def test_a_connector_that_raises_in_mid_load_leaks_nothing(lmcache, monkeypatch):
    """LMCache's retrieve has no finally: slots and pins come back by finalisers, and the next load works."""
    one, tokens, kv = stored(lmcache, staging_mib=1)

    def lost():
        raise RuntimeError("device lost")

    during(one, monkeypatch, 3, lost)
    with pytest.raises(RuntimeError, match="device lost"):
        one.retrieve(tokens, kv)
    one.engine.lookup_unpin("r")
    monkeypatch.undo()
    assert slots_and_pins(one) == (0, 0)
    assert one.lookup(tokens, request="again") == len(tokens)
    assert one.retrieve(tokens, kv, request="again") == len(tokens)


def test_a_shutdown_in_mid_load_ends_the_load_and_leaks_nothing(lmcache, monkeypatch):
    """The engine closes the backend while a retrieve walks its chunks: what had not come is not served."""
    one, tokens, kv = stored(lmcache, chunks=30, staging_mib=1)
    ring = one.backend._allocator.ring
    closer = threading.Thread(target=one.backend.close)

    def close():
        closer.start()
        closer.join(30)
        assert not closer.is_alive()

    during(one, monkeypatch, 3, close)
    loaded = one.retrieve(tokens, kv)
    assert 3 * CHUNK <= loaded < len(tokens)
    gc.collect()
    assert ring.free == ring.slots
    assert one.lookup(tokens, request="after") == 0


def test_a_load_whose_drive_hangs_ends_within_its_bound(lmcache, monkeypatch):
    """The consumer waits for the read itself; once the drive answers, late, everything has come back."""
    one, tokens, kv = stored(lmcache, staging_mib=1)
    go_on, real = threading.Event(), one.backend.store.get
    monkeypatch.setattr(one.backend.store, "get", lambda *a: go_on.wait(30) and real(*a))
    threading.Timer(0.3, go_on.set).start()
    assert one.retrieve(tokens, kv) == len(tokens)
    assert slots_and_pins(one) == (0, 0)


def test_requests_cancelled_after_their_prefetch_leak_nothing(lmcache):
    """LMCache drops the objects of an aborted request, some consumed, some never: slots and pins come back at once."""
    one, tokens, _ = stored(lmcache, staging_mib=1)
    one.engine.lookup_unpin("r")
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    for consumed in (0, 1, 5, 8):
        objs = asyncio.run(one.backend.batched_get_non_blocking("id", keys))
        assert len(objs) == 8
        assert all(obj.tensor is not None for obj in objs[:consumed])
        objs.clear()
        assert slots_and_pins(one) == (0, 0)
    objs = asyncio.run(one.backend.batched_get_non_blocking("id", keys))
    for obj in reversed(objs):  # given back in another order, as a cancelled batch is
        obj.ref_count_down()
    assert slots_and_pins(one) == (0, 0)


def test_a_chunk_larger_than_a_slot_is_a_miss(lmcache):
    """What lies under the key is another model's size: nothing of it is served, it is counted, and the slot is free."""
    one, tokens, kv = stored(lmcache, chunks=3, staging_mib=1)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    digest = one.backend._names.of(keys[1])
    assert one.backend.store.remove(digest)
    too_large = memoryview(bytearray(2 * one.backend._allocator.ring.slot_bytes))
    assert one.backend.store.put(digest, too_large, depth=1, tokens=CHUNK).kept
    assert one.retrieve(tokens, kv) == CHUNK
    assert one.backend.loader.failed.snapshot() == {"too large for the buffer": 1}
    one.end_step()
    assert slots_and_pins(one) == (0, 0)
