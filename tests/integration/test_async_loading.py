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


def test_a_full_ring_gives_a_shorter_answer_not_a_wait(lmcache):
    """The event loop is never blocked on slots that other requests hold."""
    one = lmcache(staging_mib=1)
    slots = one.backend._slots
    tokens = prompt(slots * CHUNK)
    one.store(tokens, PagedKv(len(tokens)))
    one.settle()
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    held = [one.backend.allocate(one.backend.metadata.get_shapes(), one.backend.metadata.get_dtypes()) for _ in range(2)]
    objs = asyncio.run(one.backend.batched_get_non_blocking("id", keys))
    assert len(objs) == slots - 2
    for obj in [*objs, *held]:
        obj.ref_count_down()
