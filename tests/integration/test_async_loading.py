"""LMCache's async loading asks through coroutines: the same chunks, and fewer where the ring is full."""

import asyncio

import torch

from .conftest import CHUNK, PagedKv, prompt


def test_async_lookup_and_load_bring_the_leading_chunks(lmcache):
    """What comes back is the prefix that could be loaded, as memory objects with the stored bytes."""
    one = lmcache()
    tokens = prompt(3 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens + prompt(CHUNK, seed=7))]

    async def run():
        found = await one.backend.batched_async_contains("id", keys, pin=True)
        return found, await one.backend.batched_get_non_blocking("id", keys[:found])

    found, objs = asyncio.run(run())
    assert found == len(objs) == 3
    target = kv.slots(1)
    with torch.inference_mode():  # as LMCache's retrieve does
        for i, obj in enumerate(objs):
            one.engine.gpu_connector.to_gpu(obj, i * CHUNK, (i + 1) * CHUNK, kvcaches=kv.layers, slot_mapping=target)
    for obj in objs:
        obj.ref_count_down()
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_streams_that_wait_give_their_slots_to_the_one_that_runs(lmcache):
    """Several prefetched requests hold the whole ring; the one that is consumed takes slots back, and all end right."""
    one = lmcache(staging_mib=1, store_wait_ms=30_000)
    prompts = [prompt(6 * CHUNK, seed=seed) for seed in range(20, 24)]
    kvs = [PagedKv(6 * CHUNK, seed=seed) for seed in range(20, 24)]
    for i, (tokens, kv) in enumerate(zip(prompts, kvs, strict=True)):
        one.store(tokens, kv, request=f"s{i}")
        one.settle()

    async def prefetch():
        loads = []
        for tokens in prompts:
            keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
            loads.append(await one.backend.batched_get_non_blocking("id", keys))
        return loads

    waiting = asyncio.run(prefetch())
    for objs, kv in reversed(list(zip(waiting, kvs, strict=True))):
        assert len(objs) == 6
        with torch.inference_mode():
            for i, obj in enumerate(objs):
                one.engine.gpu_connector.to_gpu(
                    obj, i * CHUNK, (i + 1) * CHUNK, kvcaches=kv.layers, slot_mapping=kv.slots(1)
                )
        for obj in objs:
            obj.ref_count_down()
        assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_a_single_load_can_be_waited_for_later(lmcache):
    """get_non_blocking answers with a future of the object."""
    one = lmcache()
    tokens = prompt(2 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    known, unknown = [key for _, _, key in one.engine.token_database.process_tokens(tokens[:CHUNK] + prompt(CHUNK))]
    obj = one.engine.storage_manager.get_non_blocking(known).result(30)
    assert bytes(obj.byte_array) == bytes(one.backend.get_blocking(known).byte_array)
    assert one.engine.storage_manager.get_non_blocking(unknown).result(30) is None


def test_a_full_ring_gives_a_shorter_answer_not_a_wait(lmcache):
    """Where chunks are held whole, the event loop is never blocked on slots that other requests hold."""
    one = lmcache(staging_mib=1, save_unfull_chunk=True)
    slots = one.backend._slots
    tokens = prompt(slots * CHUNK)
    one.store(tokens, PagedKv(len(tokens)))
    one.settle()
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    shapes, dtypes = one.backend.metadata.get_shapes(), one.backend.metadata.get_dtypes()
    held = [one.backend.allocate(shapes, dtypes) for _ in range(2)]
    objs = asyncio.run(one.backend.batched_get_non_blocking("id", keys))
    assert len(objs) == slots - 2
    for obj in [*objs, *held]:
        obj.ref_count_down()
