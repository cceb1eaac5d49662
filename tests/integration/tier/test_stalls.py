"""`NvmeTier` under vLLM's own tiering manager, on a disk that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult

from lmcache_nvme_backend.doors.tier import lookups, transfers
from lmcache_nvme_backend.store import ChunkStore
from tests.integration.tier.world import Make, Request, keys_of, noise, save_all


def test_lookups_and_jobs_never_wait_for_the_disk(world: Make, monkeypatch: pytest.MonkeyPatch):
    """A disk that hangs in every read and write: the scheduler's thread goes on, and drains once it answers."""
    one, request = world(rows=8), Request("a", 3)
    save_all(one, "r1", request)
    one.forget_host()
    gate, waiting = threading.Event(), threading.Event()

    def hangs(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            waiting.set()
            assert gate.wait(60)
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(ChunkStore, "get", hangs(ChunkStore.get))
    monkeypatch.setattr(ChunkStore, "put", hangs(ChunkStore.put))
    monkeypatch.setattr(ChunkStore, "match", hangs(ChunkStore.match))
    context, keys = one.begin("r2", request), keys_of(request)
    try:
        assert one.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
        one.step()
        fresh = Request("b", 2)
        second = one.begin("r3", fresh)
        assert one.manager.lookup(keys_of(fresh)[0], second) is LookupResult.RETRY
        one.save(second, keys_of(fresh), noise(keys_of(fresh)))
        assert waiting.wait(60)
        for _ in range(20):
            one.step()
            assert one.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
    finally:
        gate.set()
    assert one.found(context, keys) == 3
    one.settle()


def test_a_lookup_that_the_disk_never_answers_is_a_miss_after_a_while(world: Make, monkeypatch: pytest.MonkeyPatch):
    """vLLM asks in every step, and the request would wait for ever. An answer that comes too late changes nothing."""
    one, request = world(), Request("a", 2)
    gate = threading.Event()
    monkeypatch.setattr(ChunkStore, "match", lambda *_, **__: gate.wait(60) and 0)
    monkeypatch.setattr(lookups, "ANSWER_WAIT_S", 0.2)
    first, second = one.begin("r1", Request("b", 1)), one.begin("r2", request)
    one.step()  # the thread hangs while it tells of the first one
    [key, *_] = keys_of(request)
    try:
        assert one.manager.lookup(key, second) is LookupResult.RETRY
        one.step()
        assert one.manager.lookup(key, second) is LookupResult.RETRY
        time.sleep(0.3)
        assert one.manager.lookup(key, second) is LookupResult.MISS
    finally:
        gate.set()
    assert one.found(second, keys_of(request)) == 0
    assert one.found(first, keys_of(Request("b", 1))) == 0


def hang_in_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on reads wait, as in a disk that hangs, until the event is set."""
    gate, real = threading.Event(), ChunkStore.get

    def get(*given: Any) -> Any:
        assert gate.wait(60)
        return real(*given)

    monkeypatch.setattr(ChunkStore, "get", get)
    return gate


def test_a_load_that_hangs_fails_after_a_while_and_never_touches_its_rows_again(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is computed, and what the rows hold by then is another's. When the disk answers again, so does the
    tier."""
    one, request = world(rows=6), Request("a", 3)
    save_all(one, "r1", request)
    one.forget_host()
    monkeypatch.setattr(transfers, "STALL_S", 0.3)
    gate = hang_in_reads(monkeypatch)
    context, keys = one.begin("r2", request), keys_of(request)
    try:
        assert one.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
        assert one.found(context, keys) == 0
        assert one.tier.transfers.load_failures.snapshot() == {"stalled": 3}
        one.end("r2")
        other = Request("b", 6)
        second, theirs = one.begin("r3", other), keys_of(other)
        assert len(one.save(second, theirs, noise(theirs))) == 6  # every row there is
    finally:
        gate.set()
    one.settle()
    assert one.rows(second, theirs) == list(noise(theirs).values())
    one.end("r3")
    one.forget_host()
    third = one.begin("r4", request)
    assert one.found(third, keys) == 3
    assert one.rows(third, keys) == list(noise(keys).values())
    assert one.tier.transfers.load_failures.snapshot() == {"stalled": 3}


def test_a_load_that_waits_for_its_turn_does_not_stall(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is slow, and answers: what counts is the last answer, whichever load's it was."""
    one, request = world(io_threads=1), Request("a", 5)
    save_all(one, "r1", request)
    one.forget_host()
    real = ChunkStore.get
    monkeypatch.setattr(transfers, "STALL_S", 0.6)
    monkeypatch.setattr(ChunkStore, "get", lambda *given: (time.sleep(0.25), real(*given))[1])
    context, keys = one.begin("r2", request), keys_of(request)
    began = time.monotonic()
    assert one.found(context, keys) == 5
    assert time.monotonic() - began > 2 * transfers.STALL_S
    assert one.rows(context, keys) == list(noise(keys).values())


def test_a_load_that_waits_behind_stores_does_not_stall(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads are busy, and the disk works."""
    one, request, other = world(io_threads=1, rows=32), Request("a", 3), Request("b", 6)
    save_all(one, "r1", request)
    one.forget_host()
    real = ChunkStore.put
    monkeypatch.setattr(transfers, "STALL_S", 0.6)
    monkeypatch.setattr(ChunkStore, "put", lambda *given, **named: (time.sleep(0.25), real(*given, **named))[1])
    began = time.monotonic()
    one.save(one.begin("r2", other), keys_of(other), noise(keys_of(other)))
    assert one.found(one.begin("r3", request), keys_of(request)) == 3
    assert time.monotonic() - began > 2 * transfers.STALL_S
    assert one.tier.transfers.load_failures.snapshot() == {}


def test_a_reset_and_a_shutdown_do_not_wait_for_a_read_that_hangs(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drains the tier's jobs before it empties its buffer."""
    one, request = world(), Request("a", 3)
    save_all(one, "r1", request)
    one.forget_host()
    gate = hang_in_reads(monkeypatch)
    [key, *_] = keys_of(request)

    def begin_a_load(req_id: str) -> None:
        assert one.manager.lookup(key, one.begin(req_id, request)) is LookupResult.HIT_PENDING
        one.step()
        assert not one.tier.transfers.wait(0.0)

    try:
        begin_a_load("r2")
        with monkeypatch.context() as patched:
            patched.setattr(transfers, "STALL_S", 0.3)
            one.tier.drain_jobs()
        one.step()
        begin_a_load("r3")
        assert one.tier.transfers.close(0.5)
    finally:
        gate.set()
