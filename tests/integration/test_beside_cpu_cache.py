"""Beside LMCache's own CPU cache: it allocates there, and what is loaded stays right in the hot cache."""

import torch

from .conftest import CHUNK, PagedKv, prompt


def test_the_hot_cache_is_right_after_every_buffer_was_reused(lmcache):
    """Load from NVMe, let LMCache keep it, run many others through the same buffers, read it from the hot cache again."""
    tokens = prompt(4 * CHUNK)
    kv = PagedKv(len(tokens))
    first = lmcache(cpu_gib=0.1)
    first.store(tokens, kv)
    first.settle()
    first.close()

    second = lmcache(cpu_gib=0.1)
    assert second.backend.get_allocator_backend() is second.engine.storage_manager.local_cpu_backend
    assert second.lookup(tokens) == len(tokens)
    assert second.retrieve(tokens, kv) == len(tokens)
    read = second.backend.store.stats.hits
    assert read == 4
    for seed in range(2, 30):
        other = prompt(4 * CHUNK, seed=seed)
        second.store(other, PagedKv(len(other), seed=seed), request=f"o{seed}")
    second.settle()
    for layer in kv.layers:
        layer.view(torch.uint8)[kv.slots(1)[::32] // 32] = 0
    assert second.lookup(tokens, request="hot") == len(tokens)
    assert second.retrieve(tokens, kv, request="hot") == len(tokens)
    assert second.backend.store.stats.hits == read
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))
