"""The native door behind vLLM's real scheduler: every block that a step computes on is checked byte by byte."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from lmcache_nvme_backend.doors.native import front
from lmcache_nvme_backend.doors.native.facts import namespace
from lmcache_nvme_backend.doors.native.manager import RequestPrefix
from lmcache_nvme_backend.doors.native.settings import HF_CONFIG
from lmcache_nvme_backend.doors.vllm_facts import digest_config
from tests.integration.native import scenarios
from tests.integration.native.room import Room, chunk_files, prompt
from tests.integration.native.scenarios import TOKENS, kinds

FULL, HYBRID = kinds(hybrid=False), kinds(hybrid=True)
both = pytest.mark.parametrize("kind", [FULL, HYBRID], ids=["full", "hybrid"])


@both
def test_a_prompt_comes_from_the_drive_once_the_pool_is_empty_and_after_a_restart(tmp_path: Path, kind: Any) -> None:
    """Nothing but the drive holds it, whatever kinds of layers the model has."""
    found = scenarios.restart(tmp_path, **kind)
    assert found["served"] == [0, 992, 992]
    assert found["files"] == found["hits"] == (31 if kind is FULL else 62 + 3)


def test_sliding_windows_are_loaded_as_far_as_they_reach(tmp_path: Path) -> None:
    """Of three windowed groups, what lies within the window; of the attention group, everything."""
    found = scenarios.restart(tmp_path, window=100)
    assert found["groups"] == ["FullAttentionSpec", *3 * ["SlidingWindowSpec"]]
    assert found["served"] == [0, 992, 992]
    scenarios_root = tmp_path / "damaged"
    scenarios_root.mkdir()
    damaged = scenarios.damaged(scenarios_root, 0, window=100)
    assert damaged["again"] == 992
    assert damaged["again_loads"] == 1


def test_a_tier_that_stands_aside_is_degraded(tmp_path: Path) -> None:
    """As long as the disk fails, and no longer."""
    room = Room(tmp_path)
    for aside in (0, 1, 0):
        room.side.store._breaker.open = bool(aside)
        values = room.side.values()
        assert (values["kvtier_breaker_open"], values["kvtier_degraded"]) == (aside, aside)
    room.close()


@pytest.mark.parametrize("separate", [False, True], ids=["one process", "two processes"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_damaged_chunk_of_any_group_costs_a_recompute_and_no_second_load(
    tmp_path: Path, rank: int, separate: bool
) -> None:
    """The engine lives, the tokens' KV is right, the chunk is not tried again, and it is stored anew."""
    found = scenarios.damaged(tmp_path, rank, separate, **HYBRID)
    assert found["loads"] == [65]
    assert (found["again"], found["again_loads"]) == (992, 1)
    assert found["corrupt"] == 1
    assert sum(found["failed"].values()) == 1
    assert found["slots_came_back"]


def test_what_lies_before_a_damaged_chunk_is_loaded_in_a_second_try(tmp_path: Path) -> None:
    """With full attention alone, the head of the prefix is still worth its load."""
    found = scenarios.damaged(tmp_path, 0, **FULL)
    assert found["loads"] == [31, 15]
    assert found["again"] == 992


def test_a_disk_that_reads_nothing_is_given_up_after_a_few_tries(tmp_path: Path) -> None:
    """Each load fails on another chunk; the request is computed all the same."""
    room = Room(tmp_path, **FULL)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    room.forget()
    for file in chunk_files(tmp_path):
        os.truncate(file, 4096)
    room.serve("asked", prompt(TOKENS))
    assert 1 <= len([name for name, _ in room.loads if name == "asked"]) <= 3
    room.close()


def test_chunks_that_another_engine_evicted_are_a_miss(tmp_path: Path) -> None:
    """Files may go at any time; the index is a hint."""
    room = Room(tmp_path, **HYBRID)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    room.forget()
    for file in chunk_files(tmp_path)[10:20]:
        file.unlink()
    room.serve("asked", prompt(TOKENS))
    assert len(room.loads) == 1
    assert room.side.loads.failed.snapshot() == {"absent": 1} or "absent" in room.side.loads.failed.snapshot()
    room.close()


def test_what_another_engine_stores_is_served_without_being_told(tmp_path: Path) -> None:
    """Two engines on one root, open at the same time: states and attention alike."""
    first, second = Room(tmp_path, **HYBRID), Room(tmp_path, separate=True, **HYBRID)
    first.serve("cold", prompt(TOKENS))
    first.wait_stored()
    assert second.serve("elsewhere", prompt(TOKENS)) == 992
    first.close()
    second.close()


def test_a_salt_keeps_requests_apart(tmp_path: Path) -> None:
    """vLLM's block hashes carry the salt, and keys come of them."""
    room = Room(tmp_path, **FULL)
    room.serve("one", prompt(TOKENS), cache_salt="a")
    room.wait_stored()
    room.forget()
    assert room.serve("other", prompt(TOKENS), cache_salt="b") == 0
    room.wait_stored()
    room.forget()
    assert room.serve("same", prompt(TOKENS), cache_salt="a") == 992
    room.close()


def test_an_adapter_with_other_weights_under_the_same_name_and_path_finds_nothing(tmp_path: Path) -> None:
    """vLLM's block hashes have an adapter's name and path; the weights are this door's to tell apart."""
    from vllm.lora.request import LoRARequest

    root, adapter = tmp_path / "cache", tmp_path / "adapter"
    root.mkdir()
    adapter.mkdir()

    def serve(weights: bytes) -> int:
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        (adapter / "adapter_config.json").write_text("{}")
        room = Room(root, **FULL)
        served = room.serve("asked", prompt(TOKENS), lora_request=LoRARequest("story", 1, str(adapter)))
        room.wait_stored()
        room.close()
        return served

    header = (2).to_bytes(8, "little") + b"{}"
    assert serve(header + b"one") == 0
    assert serve(header + b"two") == 0


def test_a_full_disk_never_keeps_a_state_whose_prefix_is_gone(tmp_path: Path) -> None:
    """Eviction goes from the tail: a state before its attention chunks, which nothing else reaches."""
    room = Room(tmp_path, hybrid=True, quota_gib=0.003)
    prompts = {f"p{i}": prompt(400 + 48 * i, seed=i) for i in range(12)}
    requests = {}
    for name, tokens in prompts.items():
        requests[name] = room.add(name, tokens)
        room.run()
        room.wait_stored()
        room.forget()
    there = {bytes.fromhex(file.name.split("-")[0]) for file in chunk_files(tmp_path)}
    used = sum(file.stat().st_size for file in chunk_files(tmp_path))
    assert used <= room.side.store.usage().quota_bytes + room.side.ring.nbytes
    assert room.side.store.stats.evictions > 100
    kept = 0
    for name, request in requests.items():
        prefix = RequestPrefix(room.manager._groups, request.block_hashes, "base", "")
        for end in range(1, len(request.block_hashes) + 1):
            needed = set(prefix.order.upto(request.block_hashes, end))
            attention = {prefix.key_of(request.block_hashes[i], 3) for i in range(end)}
            states = needed - attention
            if states & there:
                kept += 1
                assert attention <= there, f"{name}: a state at {end} without its prefix"
    assert kept
    assert room.serve("last", prompts["p11"]) > 0
    room.close()


def test_preempted_requests_come_back_with_the_right_blocks(tmp_path: Path) -> None:
    """A pool too small for all: blocks are handed on while their chunks are being stored."""
    room = Room(tmp_path, hybrid=False, blocks=130, blocks_per_chunk=2, offload_prompt_only=False)
    for i in range(4):
        room.add(f"r{i}", prompt(500, seed=i), outputs=80)
    room.run()
    assert sum(name.startswith("r") for name, _ in room.loads) >= 1
    room.close()


def test_an_aborted_request_gives_its_blocks_back_after_its_load(tmp_path: Path) -> None:
    """Nobody else gets them while bytes are still on their way."""
    from vllm.v1.request import RequestStatus

    room = Room(tmp_path, **FULL)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    room.forget()
    room.add("gone", prompt(TOKENS))
    room._external = {}
    room.step()
    room.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    room.run()
    assert room.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == room.caches.num_blocks - 1
    assert room.serve("next", prompt(TOKENS)) == 992
    room.close()


def test_after_a_reset_nothing_stored_before_is_found(tmp_path: Path) -> None:
    """Whoever resets the external cache may have changed the weights."""
    room = Room(tmp_path, **FULL)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    assert room.scheduler.reset_prefix_cache(reset_connector=True)
    assert room.serve("asked", prompt(TOKENS)) == 0
    room.wait_stored()
    room.forget()
    assert room.serve("again", prompt(TOKENS)) == 992
    room.close()
    room = Room(tmp_path, **FULL)
    assert room.serve("restarted", prompt(TOKENS)) == 992
    room.close()


def test_a_tier_that_may_degrade_serves_without_a_cache(tmp_path: Path) -> None:
    """`on_init_error: degrade`: the engine runs, and every prompt is prefilled again."""
    room = Room(tmp_path / "missing", on_init_error="degrade", **HYBRID)
    assert room.serve("cold", prompt(300)) == 0
    room.forget()
    assert room.serve("again", prompt(300)) == 0
    room.close()


def test_a_scheduler_that_looks_elsewhere_than_rank_0_stores_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes that came to different facts would find nothing, and nobody would know why."""
    room = Room(tmp_path, **FULL)
    room.serve("same", prompt(100))
    assert "nothing will be found" not in caplog.text
    room.worker.connector_worker.spec.namespace = type(room.side.store.namespace)({"other": "facts"})
    room.serve("differs", prompt(100, seed=2))
    room.serve("still differs", prompt(100, seed=3))
    assert caplog.text.count("nothing will be found") == 1
    room.close()


@pytest.mark.parametrize("separate", [False, True], ids=["one process", "two processes"])
@both
def test_what_the_device_serves_all_day_is_not_the_first_to_go_from_the_drive(
    tmp_path: Path, kind: Any, separate: bool
) -> None:
    """Its requests load nothing; a use of its prefix each is all the same."""
    room = Room(tmp_path, quota_gib=0.004, blocks=2000, admission="all", separate=separate, **kind)
    room.serve("first", prompt(TOKENS))
    room.wait_stored()
    for i in range(12):
        room.serve(f"again {i}", prompt(TOKENS))
        room.serve(f"other {i}", prompt(800, seed=100 + i))
        room.wait_stored()
    assert room.side.store.stats.evictions > 50
    room.forget()
    assert room.serve("last", prompt(TOKENS)) == 992
    room.close()


def test_a_model_that_changes_its_configuration_when_it_is_built_has_one_namespace(tmp_path: Path) -> None:
    """The front process notes what it was; a worker's process has the changed one, a scheduler's may not."""
    extra: dict[str, Any] = {"spec_name": "NvmeOffloadingSpec"}
    transfer = SimpleNamespace(kv_connector="NvmeOffloadingConnector", kv_connector_extra_config=extra)
    model = SimpleNamespace(hf_config=SimpleNamespace(hidden_size=8))
    front.note_configuration(SimpleNamespace(kv_transfer_config=transfer, model_config=model))
    noted = transfer.kv_connector_extra_config[HF_CONFIG]
    assert noted == digest_config(model.hf_config)
    digests = set()
    for changed in (False, True):
        room = Room(tmp_path, **{HF_CONFIG: noted})
        spec = room.worker.connector_worker.spec
        if changed:
            room.config.model_config.hf_config.max_model_len = 2_000
        engine = spec._engine
        assert engine.vllm_config is room.config
        facts = namespace(spec.settings, spec.config, engine.vllm_config, engine.kv_cache_config)
        digests.add(facts.digest)
        room.close()
    assert len(digests) == 1
    others = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={})
    front.note_configuration(SimpleNamespace(kv_transfer_config=others, model_config=model))
    assert others.kv_connector_extra_config == {}


def test_a_lookup_that_is_put_off_counts_when_it_has_ended(tmp_path: Path) -> None:
    """vLLM lets a request wait while another one loads its chunks: what is there is no miss."""
    room = Room(tmp_path, **FULL)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    room.forget()
    hits, misses = room.manager.hits, room.manager.misses
    room._external = {}
    for name in ("first", "put off"):
        room.add(name, prompt(TOKENS))
    room.step()
    assert [name for name, _ in room.loads] == ["first"]
    assert (room.manager.hits, room.manager.misses) == (hits + 31, misses)
    room.run()
    assert (room.manager.hits, room.manager.misses) == (hits + 31, misses)
    room.close()
