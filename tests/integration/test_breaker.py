"""A disk that fails under LMCache: the tier steps aside, the engine goes on, and the tier comes back."""

import errno

import torch

from lmcache_nvme_backend.store.breaker import ERRORS_TO_OPEN
from tests.faults.support.injection import Fault

from .conftest import CHUNK, PagedKv, prompt


def test_a_disk_that_fails_every_read_costs_misses_and_then_nothing(lmcache, monkeypatch):
    """Loads are cut short, then lookups find nothing, stores copy nothing and /metrics says so; later all is back."""
    one = lmcache()
    tokens = prompt(4 * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    with monkeypatch.context() as patch:
        Fault(patch, "open", 1, errno.ESTALE, for_good=True)
        for turn in range(2 * ERRORS_TO_OPEN):
            found = one.lookup(tokens, request=f"r{turn}")
            if not found:
                break
            assert one.retrieve(tokens, kv, request=f"r{turn}") == 0
            one.end_step()
        assert found == 0 and one.backend.store.stands_aside
        values = one.backend._values()
        assert values["kvtier_breaker_open"] == 1 and values["kvtier_degraded"] == 1
        other = prompt(3 * CHUNK, seed=2)
        one.store(other, PagedKv(len(other)), request="new")
        one.settle()
        assert one.backend.saver.dropped.snapshot()["stepped aside"] == 3
    one.backend.store._breaker._probe_at = 0
    one.backend.store._breaker.try_again()
    assert one.lookup(tokens, request="back") == len(tokens)
    assert one.retrieve(tokens, kv, request="back") == len(tokens)
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))
    values = one.backend._values()
    assert values["kvtier_breaker_open"] == 0 and values["kvtier_degraded"] == 0
    one.store(other, PagedKv(len(other)), request="new again")
    one.settle()
    assert one.lookup(other, request="stored") == len(other)
