"""Chunks through the real LMCache engine and back, bit for bit."""

import pytest
import torch

from .conftest import CHUNK, PagedKv, lmcache_metadata, prompt


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mla", [False, True], ids=["attention", "mla"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_kv_comes_back_bit_exact_after_a_restart(lmcache, dtype, mla):
    """Stored, the engine closed and made again, loaded into other blocks: the same bytes in every layer."""
    tokens = prompt(4 * CHUNK)
    kv = PagedKv(len(tokens), dtype, mla)
    first = lmcache(lmcache_metadata(dtype, mla))
    assert first.lookup(tokens) == 0
    first.store(tokens, kv)
    first.settle()
    first.close()

    second = lmcache(lmcache_metadata(dtype, mla))
    assert second.lookup(tokens) == len(tokens)
    assert second.retrieve(tokens, kv) == len(tokens)
    assert equal(kv.content(0), kv.content(1))
