"""Lookups: what they promise, what they pin, and what they refresh."""

from pathlib import Path

import torch

from .conftest import CHUNK, PagedKv, prompt


def stored(lmcache, chunks, **changes):
    one = lmcache(**changes)
    tokens = prompt(chunks * CHUNK)
    kv = PagedKv(len(tokens))
    one.store(tokens, kv)
    one.settle()
    return one, tokens, kv


def test_a_lookup_answers_with_the_leading_chunks(lmcache):
    """A prompt that continues differently finds what it shares, in whole chunks."""
    one, tokens, _ = stored(lmcache, 4)
    other = tokens[: 2 * CHUNK + 100] + prompt(2 * CHUNK, seed=9)
    assert one.lookup(other, request="other") == 2 * CHUNK


def test_a_gap_ends_the_answer(lmcache):
    """Chunks behind a missing one are of no use."""
    one, tokens, _ = stored(lmcache, 4)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    assert one.backend.remove(keys[1])
    assert not one.backend.remove(keys[1])
    assert one.lookup(tokens) == CHUNK


def test_a_hit_of_any_length_streams_through_a_small_ring(lmcache):
    """Twelve chunks through a ring of a few slots: all promised, all delivered, bit for bit."""
    first, tokens, kv = stored(lmcache, 12)
    first.close()
    small = lmcache(staging_mib=1)
    assert small.backend._streams and 2 <= small.backend._slots < 12
    assert small.lookup(tokens) == 12 * CHUNK
    assert small.retrieve(tokens, kv) == 12 * CHUNK
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


def test_whole_chunks_are_never_promised_beyond_the_ring(lmcache):
    """Where LMCache cannot stream, what is promised is what the ring can hold at once."""
    first, tokens, kv = stored(lmcache, 12)
    first.close()
    small = lmcache(staging_mib=1, save_unfull_chunk=True)
    slots = small.backend._slots
    assert not small.backend._streams
    assert small.lookup(tokens) == 0  # partial chunks are another namespace
    small.store(tokens[: slots * CHUNK], kv)
    small.settle()
    for seed in (5, 6):
        more = tokens[: slots * CHUNK] + prompt(2 * CHUNK, seed=seed)
        small.store(more, PagedKv(len(more)), skip=slots * CHUNK, request=f"more{seed}")
        small.settle()
        assert small.lookup(more, request=f"again{seed}") == slots * CHUNK


def test_pins_of_a_lookup_hold_until_they_are_given_back(lmcache):
    """Between lookup and load nothing evicts what was promised; after the load everything can go."""
    one, tokens, kv = stored(lmcache, 8, quota_gib=0.0025, staging_mib=2)
    assert one.lookup(tokens, request="a") == 8 * CHUNK
    for seed in range(2, 14):
        one.store(prompt(4 * CHUNK, seed=seed), PagedKv(4 * CHUNK, seed=seed), request=f"s{seed}")
        one.settle()
    assert one.backend.store.stats.evictions > 0
    assert one.retrieve(tokens, kv, request="a") == 8 * CHUNK
    for seed in range(14, 40):
        one.store(prompt(4 * CHUNK, seed=seed), PagedKv(4 * CHUNK, seed=seed), request=f"s{seed}")
        one.settle()
    assert one.lookup(tokens, request="b") < 8 * CHUNK


def test_what_is_looked_up_stays_and_what_is_not_goes(lmcache):
    """A session in use survives the ones that came once."""
    one, tokens, _ = stored(lmcache, 4, quota_gib=0.0025, staging_mib=2)
    for seed in range(2, 40):
        assert one.lookup(tokens, request=f"keep{seed}") == 4 * CHUNK
        one.engine.lookup_unpin(f"keep{seed}")
        one.store(prompt(2 * CHUNK, seed=seed), PagedKv(2 * CHUNK, seed=seed), request=f"s{seed}")
        one.settle()
    assert one.backend.store.stats.evictions > 0
    assert one.lookup(tokens, request="end") == 4 * CHUNK


def test_the_quota_holds_and_the_tail_goes_first(lmcache):
    """Under pressure a prefix loses its end, never its beginning."""
    one, tokens, _ = stored(lmcache, 10, quota_gib=0.0025, staging_mib=2)
    keys = [key for _, _, key in one.engine.token_database.process_tokens(tokens)]
    names = [one.backend._names.of(key).hex() for key in keys]
    lengths = []
    for seed in range(2, 40):
        one.store(prompt(CHUNK, seed=seed), PagedKv(CHUNK, seed=seed), request=f"s{seed}")
        one.settle()
        usage = one.backend.store.usage()
        assert usage.used_bytes <= usage.quota_bytes
        on_disk = {path.name.split("-")[0] for path in Path(one.backend.store.directory).glob("*/*.kv")}
        left = [name in on_disk for name in names]
        assert left == sorted(left, reverse=True)
        lengths.append(sum(left))
    assert any(0 < length < 10 for length in lengths)


def test_an_audited_backend_is_still_the_allocator(lmcache, tmp_path):
    """LMCache's audit wrapper hides a backend's class; the plugin is found behind it."""
    from lmcache.v1.storage_backend.audit_backend import AuditBackend

    one = lmcache()
    manager = one.engine.storage_manager
    manager.storage_backends["nvme"] = AuditBackend(one.backend)
    try:
        assert manager._get_allocator_backend(one.engine.config) is one.backend
    finally:
        manager.storage_backends["nvme"] = one.backend


def test_clear_counts_tokens_and_leaves_nothing(lmcache):
    """LMCache's clear asks for tokens."""
    one, tokens, _ = stored(lmcache, 4)
    assert one.engine.clear() == 4 * CHUNK
    assert one.lookup(tokens) == 0
    assert one.backend.store.usage().namespace_chunks == 0
