"""A chunk that cannot be loaded is a miss: the mask is cut there and nothing else happens."""

import os
from pathlib import Path

import pytest
import torch

from .conftest import CHUNK, PagedKv, prompt


def files(one):
    return sorted(Path(one.backend.store.directory).glob("*/*.kv"), key=lambda p: p.name.split("-")[1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "removed": lambda p: p.unlink(),
    "truncated": lambda p: os.truncate(p, p.stat().st_size // 2),
    "flipped": flip,
    "emptied": lambda p: os.truncate(p, 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_mask_is_cut_at_the_damaged_chunk(lmcache, damage):
    """Chunks before it are served and right; from it on, vLLM recomputes; the slots all come back."""
    one = lmcache()
    tokens = prompt(6 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    assert one.lookup(tokens) == 6 * CHUNK
    DAMAGE[damage](files(one)[3])
    assert one.retrieve(tokens, kv) == 3 * CHUNK
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0, 3 * CHUNK), kv.content(1, 3 * CHUNK), strict=True))
    assert one.backend.loader.failed.total() == 1
    one.end_step()
    assert one.lookup(tokens, request="again") == 3 * CHUNK
    one.store(tokens, kv, skip=3 * CHUNK, request="again")
    one.settle()
    assert one.lookup(tokens, request="mended") == 6 * CHUNK


def test_another_models_chunk_under_this_name_is_a_miss(lmcache, tmp_path):
    """A file of the same size from another namespace is not served."""
    from .conftest import lmcache_metadata

    one = lmcache()
    tokens = prompt(2 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    other = lmcache(lmcache_metadata(rank=0), model_fingerprint="other")
    other.store(tokens, PagedKv(len(tokens), seed=5))
    other.settle()
    mine, theirs = files(one)[0], files(other)[0]
    mine.write_bytes(theirs.read_bytes())
    assert one.lookup(tokens) == 2 * CHUNK
    assert one.retrieve(tokens, kv) == 0


def test_loading_only_what_vllm_lacks_leaves_its_blocks_alone(lmcache):
    """Blocks that vLLM already holds may be shared with a running request: they are not written."""
    one = lmcache()
    tokens = prompt(2 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    before = kv.content(1)
    assert one.lookup(tokens) == 2 * CHUNK
    held = CHUNK + 64
    assert one.retrieve(tokens, kv, cached=held) == CHUNK
    stored, after = kv.content(0), kv.content(1)
    for layer in range(len(after)):
        assert torch.equal(after[layer][: held // 32], before[layer][: held // 32])
        assert torch.equal(after[layer][held // 32 :], stored[layer][held // 32 :])


def test_partial_chunks_come_back_with_their_own_length(lmcache):
    """save_unfull_chunk keeps the end of a prompt too."""
    tokens = prompt(CHUNK + 96)
    kv = PagedKv(len(tokens))
    one = lmcache(save_unfull_chunk=True)
    one.store(tokens, kv)
    one.settle()
    assert one.lookup(tokens) == len(tokens)
    assert one.retrieve(tokens, kv) == len(tokens)
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_what_a_failed_step_computes_is_never_stored(lmcache):
    """vLLM's forward pass has used the blocks that were not loaded: what it computes behind them is worthless.

    Nobody's chunks of that step are stored, nor what the next step adds to the failed request; once the request is
    offered again from before the failure, with the right bytes, all of it is.
    """
    one = lmcache()
    tokens = prompt(8 * CHUNK)
    right, wrong = PagedKv(len(tokens)), PagedKv(len(tokens), seed=66)
    one.store(tokens[: 4 * CHUNK], right, request="before")
    one.settle()
    hit = tokens[: 4 * CHUNK]
    assert one.lookup(hit, request="a") == 4 * CHUNK
    flip(files(one)[1])
    # The failing step: the load, then the forward pass that fills chunks 4 and 5 with nonsense, beside another request.
    assert one.retrieve(hit, PagedKv(len(hit)), request="a") == CHUNK
    with one.backend.saving_step():
        one.store(tokens[: 6 * CHUNK], wrong, skip=4 * CHUNK, request="a", step=False)
        one.store(prompt(2 * CHUNK, seed=5), wrong, request="beside", step=False)
    # One that the scheduler had sent off before it knew.
    one.store(tokens[: 7 * CHUNK], wrong, skip=6 * CHUNK, request="a")
    one.settle()
    assert one.backend.store.usage().namespace_chunks == 3
    # Rolled back and computed again.
    one.store(tokens, right, skip=CHUNK, request="a")
    one.settle()
    assert one.lookup(tokens, request="b") == 8 * CHUNK
    assert one.retrieve(tokens, right, request="b") == 8 * CHUNK
    assert all(torch.equal(a, b) for a, b in zip(right.content(0), right.content(1), strict=True))


def test_a_load_that_failed_on_another_rank_stops_this_ones_stores_too(lmcache):
    """Its layers have computed with the other rank's results."""
    one = lmcache()
    tokens = prompt(6 * CHUNK)
    wrong = PagedKv(len(tokens), seed=66)
    with one.backend.saving_step([("a", 4 * CHUNK)]):
        one.store(tokens, wrong, skip=4 * CHUNK, request="a", step=False)
    one.settle()
    assert one.backend.store.usage().namespace_chunks == 0
    one.store(tokens, PagedKv(len(tokens)), request="b")
    one.settle()
    assert one.backend.store.usage().namespace_chunks == 6
