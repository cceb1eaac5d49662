"""Admission through the real LMCache: decided before bytes move, and never half a prefix."""

from __future__ import annotations

import time

import pytest
import torch

from lmcache_nvme_backend.store.returns import SAME_USE_S

from .conftest import CHUNK, PagedKv, prompt
from .test_store import dropped


def ask(one, tokens, kv, request):
    """What a request does: a lookup, then the store of what it did not find."""
    hit = one.lookup(tokens, request=request)
    one.engine.lookup_unpin(request)
    one.store(tokens, kv, skip=hit, request=request)
    one.settle()
    return hit


def test_second_sight_writes_the_second_time_and_hits_the_third(lmcache):
    """The first request writes nothing, and does not stand in the way of the next."""
    one = lmcache(admission="second-sight")
    tokens = prompt(5 * CHUNK)
    kv = PagedKv(len(tokens))
    assert ask(one, tokens, kv, "first") == 0
    assert one.backend.store.stats.stores == 0
    assert dropped(one) == {"first sight": 5}
    time.sleep(SAME_USE_S + 0.1)  # uses within that are one
    assert ask(one, tokens, kv, "second") == 0
    assert one.backend.store.stats.stores == 5
    assert ask(one, tokens, kv, "third") == len(tokens)
    assert one.lookup(tokens, request="third") == len(tokens)
    assert one.retrieve(tokens, kv, request="third") == len(tokens)
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_later_steps_of_a_refused_request_are_refused_alike(lmcache):
    """A long prefill comes in steps: what follows a refused chunk is never stored, and counted under its cause."""
    one = lmcache(admission="second-sight")
    tokens = prompt(6 * CHUNK)
    kv = PagedKv(len(tokens))
    one.lookup(tokens, request="long")
    one.engine.lookup_unpin("long")
    one.store(tokens[: 2 * CHUNK], kv, request="long")
    one.store(tokens[: 4 * CHUNK], kv, skip=2 * CHUNK, request="long")
    one.store(tokens, kv, skip=4 * CHUNK, request="long")
    one.settle()
    assert dropped(one) == {"first sight": 6}
    assert one.backend.store.usage().namespace_chunks == 0


def test_by_default_a_disk_with_room_takes_what_is_seen_first(lmcache):
    """`auto` refuses nothing while nothing has to go for it."""
    one = lmcache()
    tokens = prompt(3 * CHUNK)
    kv = PagedKv(len(tokens))
    assert ask(one, tokens, kv, "first") == 0
    assert ask(one, tokens, kv, "second") == len(tokens)
    assert dropped(one) == {}


@pytest.mark.parametrize("held_whole", [False, True], ids=["streamed", "held whole"])
def test_a_spent_write_budget_ends_a_prefix_and_is_counted(lmcache, held_whole):
    """What the day's budget does not cover is dropped, and the rest of the prefix with it."""
    burst = 330 * 1024  # a quarter of the day's budget: three chunks of 96 KiB and their headers
    one = lmcache(admission="all", write_budget_gib_per_day=4 * burst / 2**30, save_unfull_chunk=held_whole)
    tokens = prompt(8 * CHUNK)
    kv = PagedKv(len(tokens))
    ask(one, tokens, kv, "first")
    assert 0 < one.backend.store.stats.bytes_written <= burst
    assert CHUNK <= one.lookup(tokens, request="again") <= 3 * CHUNK
    assert dropped(one)["write budget"] >= 1
    assert sum(dropped(one).values()) >= 5
