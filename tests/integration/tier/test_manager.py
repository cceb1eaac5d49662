"""`NvmeTier` under vLLM's own tiering manager: what comes back, what does not, and who waits."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkStore, Hit
from tests.integration.tier.world import (
    ATTENTION,
    ROW,
    STATE,
    Make,
    Region,
    Request,
    World,
    chunk_files,
    create_tier,
    keys_of,
    noise,
    offloading_config,
    save_all,
)


def test_what_the_host_has_lost_comes_back_byte_for_byte(world: Make):
    """Stored, evicted from the host, asked for again: promoted, and the same."""
    one, request = world(), Request("a", 5)
    save_all(one, "r1", request)
    one.forget_host()
    context, keys = one.begin("r2", request), keys_of(request)
    assert one.found(context, keys) == 5
    assert one.rows(context, keys) == list(noise(keys).values())


def test_what_is_stored_survives_a_restart(world: Make, tmp_path: Path):
    """Another process's tier on the same root serves it; another model's does not."""
    request, keys = Request("a", 4), keys_of(Request("a", 4))
    with World(tmp_path) as first:
        save_all(first, "r1", request)
    second = world()
    context = second.begin("r", request)
    assert second.found(context, keys) == 4
    assert second.rows(context, keys) == list(noise(keys).values())
    other = world(model_fingerprint="other")
    assert other.found(other.begin("r", request), keys) == 0


def test_what_another_engine_stores_now_is_found_without_being_told(world: Make):
    """Two engines share one root: a miss looks at the file system before it says no."""
    one, other, request = world(), world(), Request("shared", 3)
    assert other.found(other.begin("before", request), keys_of(request)) == 0
    save_all(one, "r", request)
    context = other.begin("after", request)
    assert other.found(context, keys_of(request)) == 3
    assert other.rows(context, keys_of(request)) == list(noise(keys_of(request)).values())


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_chunk_fails_alone_and_is_not_asked_for_again(world: Make, tmp_path: Path, damage: str):
    """The promotion keeps what came before and after; the request sees a miss there and ends; the next one, too."""
    one, request = world(), Request("a", 5)
    save_all(one, "r1", request)
    one.forget_host()
    broken = chunk_files(tmp_path)[2]
    if damage == "flipped":
        data = bytearray(broken.read_bytes())
        data[-100] ^= 1
        broken.write_bytes(data)
    elif damage == "truncated":
        os.truncate(broken, 4096)
    else:
        broken.unlink()
    context, keys = one.begin("r2", request), keys_of(request)
    assert one.found(context, keys) == 2
    assert one.rows(context, keys[:2]) == list(noise(keys).values())[:2]
    assert one.rows(context, keys[3:]) == list(noise(keys).values())[3:]
    causes = one.tier.transfers.load_failures.snapshot()
    assert sum(causes.values()) == 1
    one.end("r2")
    again = one.begin("r3", request)
    assert one.found(again, keys) == 2
    assert sum(one.tier.transfers.load_failures.snapshot().values()) == 1
    # Computed again, it is stored again, and whole.
    one.save(again, keys, noise(keys))
    one.settle()
    one.end("r3")
    one.forget_host()
    context = one.begin("r4", request)
    assert one.found(context, keys) == 5 and one.rows(context, keys) == list(noise(keys).values())


def test_a_disk_that_fails_to_read_is_a_miss_and_no_livelock(world: Make, monkeypatch: pytest.MonkeyPatch):
    """The index still says hit; the request that has seen the failure is told no."""
    one, request = world(), Request("a", 3)
    save_all(one, "r1", request)
    one.forget_host()
    real = os.preadv

    def fails(*_: object) -> int:
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "preadv", fails)
    context = one.begin("r2", request)
    assert one.found(context, keys_of(request)) == 0
    monkeypatch.setattr(os, "preadv", real)


def test_stores_beyond_the_bound_are_dropped_with_what_follows(world: Make, monkeypatch: pytest.MonkeyPatch):
    """Half of the host's rows may wait for the disk; the rest of the prefix is not stored behind the gap."""
    one, request = world(rows=8), Request("a", 6)
    gate, real = threading.Event(), ChunkStore.put
    monkeypatch.setattr(ChunkStore, "put", lambda *given, **named: (gate.wait(60), real(*given, **named))[1])
    context, keys = one.begin("r", request), keys_of(request)
    try:
        one.save(context, keys[:3], noise(keys))
        one.save(context, keys[3:5], noise(keys))
    finally:
        gate.set()
    one.settle()
    one.save(context, keys[5:], noise(keys))
    one.settle()
    assert one.tier.transfers.dropped.snapshot() == {"too many in flight": 2, "its prefix was cut": 1}
    one.end("r")
    one.forget_host()
    assert one.found(one.begin("r2", request), keys) == 3


def test_the_quota_holds_over_a_longer_run_than_it_fits(world: Make, tmp_path: Path):
    """Heads of what was used last are there; the disk never had more than the quota."""
    one = world(quota_gib=100 * ROW / 2**30, rows=8, admission="all")
    peak = 0
    for number in range(40):
        request = Request(f"p{number}", 4)
        save_all(one, f"r{number}", request)
        peak = max(peak, sum(path.stat().st_size for path in tmp_path.rglob("*.kv")))
    assert peak <= 100 * ROW and one.tier.store.stats.evictions > 50
    one.forget_host()
    last = Request("p39", 4)
    assert one.found(one.begin("last", last), keys_of(last)) == 4


def test_a_prompt_that_the_host_serves_stays_on_the_disk_as_well(world: Make):
    """It is never asked of the tier, and it is what a restart should find: each request of it is a use."""
    one = world(quota_gib=70 * ROW / 2**30, rows=64, admission="all")
    hot, keys = Request("hot", 4), keys_of(Request("hot", 4))
    save_all(one, "hot", hot)
    for number in range(20):
        save_all(one, f"r{number}", Request(f"p{number}", 4))
        context = one.begin(f"hot {number}", hot)
        assert all(one.manager.lookup(key, context) is LookupResult.HIT for key in keys)
        one.rows(context, keys)
        one.end(f"hot {number}")
    assert one.tier.store.stats.evictions > 10 and one.tier.lookups.counts.snapshot() == {}
    one.forget_host()
    assert one.found(one.begin("after", hot), keys) == 4


def test_a_hybrid_models_states_go_with_their_attention(world: Make):
    """In a store that is too small a state never stays without the attention it stands on."""
    one = world(hybrid=True, quota_gib=70 * ROW / 2**30, rows=16)
    requests = [Request(f"p{number}", 6) for number in range(12)]
    for number, request in enumerate(requests):
        keys = keys_of(request) + [keys_of(request, STATE)[i] for i in (2, 5)]
        save_all(one, f"r{number}", request, keys)
    store = one.tier.store
    assert store.stats.evictions > 10
    for number, request in enumerate(requests):
        prefix = one.tier._prefix(one.begin(f"q{number}", request))
        here = {
            (group, at)
            for group in (ATTENTION, STATE)
            for at, key in enumerate(keys_of(request, group))
            if store.known(prefix.key(key))
        }
        for group, at in here:
            if group == STATE:
                assert all((ATTENTION, before) in here for before in range(at + 1))
    one.forget_host()
    context = one.begin("last", requests[-1])
    wanted = [*keys_of(requests[-1]), keys_of(requests[-1], STATE)[5]]
    assert one.found(context, wanted) == 7
    assert one.rows(context, wanted) == list(noise(wanted).values())


def test_an_adapters_path_with_other_weights_is_another_key(world: Make, tmp_path: Path):
    """vLLM's hashes name an adapter by name and path: the same there with other weights must not hit."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"1" * 5000)
    root = tmp_path / "root"
    root.mkdir()
    lora = SimpleNamespace(lora_name="red", lora_int_id=1, lora_path=str(folder))
    request, keys = Request("a", 3, lora), keys_of(Request("a", 3, lora))
    with World(root) as first:
        save_all(first, "r1", request)
        first.forget_host()
        context = first.begin("r2", request)
        assert first.found(context, keys) == 3
    import lmcache_nvme_backend.doors.scope as scope

    scope._adapters = scope._Adapters()  # a new process
    (folder / "adapter_model.bin").write_bytes(b"2" * 5000)
    with World(root) as second:
        assert second.found(second.begin("r", request), keys) == 0
    scope._adapters = scope._Adapters()
    (folder / "adapter_model.bin").write_bytes(b"1" * 5000)
    with World(root) as third:
        assert third.found(third.begin("r", request), keys) == 3


def test_a_request_that_is_not_known_is_served_by_its_keys(world: Make):
    """Another tier's requests (a peer's, say) come without vLLM's request behind them."""
    one, keys = world(), [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]
    context = one.begin("r1", None)
    one.save(context, keys, noise(keys))
    one.settle()
    one.end("r1")
    one.forget_host()
    context = one.begin("r2", None)
    assert one.found(context, keys) == 3
    assert one.rows(context, keys) == list(noise(keys).values())


def test_a_preempted_request_finds_what_it_has_stored_meanwhile(world: Make):
    """Its first lookup said no; the chunks that it stored since are there."""
    one, request = world(), Request("a", 3)
    context, keys = one.begin("r", request), keys_of(request)
    assert one.found(context, keys) == 0
    one.save(context, keys, noise(keys))
    one.forget_host()
    assert one.found(context, keys) == 3


def test_shutdown_ends_what_runs_and_leaves_the_root_to_others(world: Make, tmp_path: Path):
    """In the middle of stores: no thread, no session, no hold on the buffer, and what is there is whole."""
    before = threading.active_count()
    with World(tmp_path, rows=8) as first:
        request = Request("a", 4)
        context = first.begin("r", request)
        first.save(context, keys_of(request), noise(keys_of(request)))
    assert threading.active_count() == before
    assert first.region.closed and not list((tmp_path / "v1/sessions").iterdir())
    second = world()
    found = second.found(second.begin("r", request), keys_of(request))
    assert found == len(chunk_files(tmp_path))


def test_the_managers_numbers_are_the_tiers(world: Make):
    """Bytes, times and failures under vLLM's own names; causes under the tier's."""
    one, request = world(), Request("a", 4)
    save_all(one, "r1", request)
    one.forget_host()
    assert one.found(one.begin("r2", request), keys_of(request)) == 4
    data = one.manager.get_stats().data["data"]
    assert data["vllm:kv_offload_tiering_write_bytes"][("1:NvmeTier",)] == 4 * ROW
    assert data["vllm:kv_offload_tiering_read_bytes"][("1:NvmeTier",)] == 4 * ROW
    assert data["vllm:kv_offload_tiering_read_time"][("1:NvmeTier",)] > 0
    from lmcache_nvme_backend.doors.tier.values import exported_values

    values = exported_values(one.tier)
    assert values["kvtier_chunks_stored_total"] == 5 and values["kvtier_chunks_loaded_total"] == 5  # and the self-test
    assert values["kvtier_chunks_hit_total"] == 4


REFUSED = {
    "root_dir": ({"root_dir": "relative"}, "root_dir: found 'relative'"),
    "path": ({"path": "/x"}, "root_dir"),
    "unknown": ({"quota_gb": 3}, "Did you mean quota_gib?"),
    "no quota": ({"quota_gib": None}, "quota_gib: found nothing"),
    "no memory of its own": ({"staging_mib": 64}, "staging_mib: found 64; allowed: nothing"),
    "missing": ({"root_dir": "/nowhere/at/all"}, "root_dir"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_sentence_with_the_names_as_written(tmp_path: Path, case: str):
    """And nothing is left open."""
    settings, text = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        create_tier(tmp_path, Region(4).create_kv_memoryview(), **settings)
    assert text in str(caught.value) and "nvme." not in str(caught.value)


def test_a_degraded_tier_serves_nothing_and_fails_nothing(tmp_path: Path):
    """`on_init_error: degrade`: the engine goes on with its host tier."""
    with World(tmp_path, root_dir="/nowhere/at/all", on_init_error="degrade") as one:
        request = Request("a", 2)
        context, keys = one.begin("r", request), keys_of(request)
        assert one.found(context, keys) == 0
        one.save(context, keys, noise(keys))
        one.settle()
        assert one.found(context, keys) == 2  # from the host


def test_every_fact_that_shapes_a_row_makes_another_namespace(tmp_path: Path):
    """Workers, groups, row size, model: none of them finds another's chunks."""
    view, digests = Region(4).create_kv_memoryview(), set()
    wide = Region(8)._memory.reshape(4, 2 * ROW)
    for config, rows in (
        (offloading_config(), view),
        (offloading_config(), memoryview(wide)),
        (offloading_config(groups=2), view),
        (offloading_config(world_size=2, tp_size=2), view),
    ):
        tier = create_tier(tmp_path, rows, config=config)
        digests.add(tier.store.namespace.digest)
        tier.shutdown()
    assert len(digests) == 4


def test_the_row_that_is_read_is_exactly_the_row_that_was_asked_for(tmp_path: Path):
    """Rows beside it are untouched by a load."""
    region = Region(3)
    view = region.create_kv_memoryview()
    tier = create_tier(tmp_path, view)
    flat = view.cast("B")
    flat[:] = b"\x07" * len(flat)
    key = tier.store.namespace.raw_digest
    assert tier.store.put(key, memoryview(b"\x09" * ROW), depth=0).kept
    assert isinstance(tier.store.get(key, flat[ROW : 2 * ROW]), Hit)
    assert bytes(flat[:ROW]) == bytes(flat[2 * ROW :]) == b"\x07" * ROW
    flat.release()
    tier.shutdown()
