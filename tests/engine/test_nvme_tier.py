"""`NvmeTier` behind vLLM's own tiering in real engines.

A hybrid model whose engine is killed; a dense one with a small host buffer and quota, and a second engine beside it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.engine import Engine, EngineSpec
from kvtier.model import find_model

from .conftest import Tiered
from .test_acid_test import maps
from .test_restart import DAMAGE

# Four engines; `make test` has the tier behind vLLM's own scheduler (tests/integration/tier).
pytestmark = pytest.mark.long

LONG, FILLS = 1500, 5
HOST_MIB = 16  # 32 chunks of the dense model's 128 tokens
QUOTA_GIB = 0.045
DENSE = ("--dtype", "float32", "--num-gpu-blocks-override", "40")
HYBRID = ("--dtype", "bfloat16")
FIRST_STATE, GROUPS = 1, 4  # a Qwen3-Next of four layers: attention, and three groups of states


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    """Token ids that no other seed begins with."""
    numbers = random.Random(seed)
    return [numbers.randrange(64, 400) for _ in range(tokens)]


class Tier(Tiered):
    """An engine with vLLM's tiering, and this tier behind its host buffer."""

    def answer(self, tokens: list[int]) -> tuple[list[int], int]:
        """Greedy token ids, and how many of the prompt's tokens came from the tiers."""
        before = self.tokens("external_kv_transfer")
        body = {"model": self.engine.spec.served_name, "prompt": tokens, "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{self.engine.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=600)
        reply.raise_for_status()
        return reply.json()["choices"][0]["token_ids"], int(self.tokens("external_kv_transfer") - before)

    def push_out(self, seeds: range) -> None:
        """Other prompts, until the pool and the host buffer hold nothing of what was before."""
        for seed in seeds:
            self.answer(prompt(seed))
        self.forget()

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*.kv"))


def start(model: Path, root: Path, folder: Path, name: str, args: tuple[str, ...], **settings: Any) -> Any:
    """A context manager of one engine."""
    entry = {"type": "NvmeTier", "module_path": "lmcache_nvme_backend", "root_dir": str(root), **settings}
    extra = {
        "spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "lmcache_nvme_backend",
        "cpu_bytes_to_use": HOST_MIB << 20, "blocks_per_chunk": 1, "secondary_tiers": [entry],
    }  # fmt: skip
    transfer = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }  # fmt: skip

    @contextmanager
    def running() -> Iterator[Tier]:
        spec = EngineSpec(
            model=model, log=folder / f"{name}.log", max_model_len=4096, max_num_batched_tokens=1024,
            args=(*args, "--kv-transfer-config", json.dumps(transfer)), env={"VLLM_SERVER_DEV_MODE": "1"},
            ready_timeout_s=600,
        )  # fmt: skip
        engine = Engine(spec)
        try:
            yield Tier(engine, root)
        finally:
            engine.stop()
            for path in maps(type("Log", (), {"log": spec.log})()):
                path.unlink(missing_ok=True)

    return running()


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a dense model's engine answers while its prompts are pushed out of the host buffer and past the quota; then
    a twin on the same root."""
    root, folder = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("logs")
    told: dict[str, Any] = {}
    with ExitStack() as stack:
        first = stack.enter_context(start(model, root, folder, "first", DENSE, quota_gib=QUOTA_GIB))
        told["first"] = first
        told["answers"] = [first.answer(prompt(1)) for _ in range(2)]
        first.wait_stored()  # on a busy machine the host buffer would push it out before the disk has it
        first.push_out(range(10, 14))
        told["evicted"] = first.answer(prompt(1))
        told["numbers"] = first.engine.metrics()
        told["peak"] = 0
        for seed in range(20, 20 + FILLS):
            first.answer(prompt(seed))
            told["peak"] = max(told["peak"], first.disk_bytes())
        first.answer(prompt(30))
        told["last"] = first.answer(prompt(30))
        told["evictions"] = first.metric("kvtier_chunks_evicted_total")
        told["twin"] = stack.enter_context(start(model, root, folder, "twin", DENSE, quota_gib=QUOTA_GIB))
        yield told


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a Qwen3-Next with random weights answers, and the engine that was started after the first was killed."""
    root, folder = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("logs")
    model = find_model("hybrid", lambda _: None)
    told: dict[str, Any] = {"answers": {}, "files": {}}
    with start(model, root, folder, "first", HYBRID, quota_gib=1) as first:
        for seed in (1, 2, 3):
            before = set(root.glob("v1/*/*/*.kv"))
            # Three times: vLLM keeps a hybrid's states where a prefix is seen to be shared.
            told["answers"][seed] = [first.answer(prompt(seed))[0] for _ in range(3)]
            first.wait_stored()
            told["files"][seed] = set(root.glob("v1/*/*/*.kv")) - before
        first.engine.kill()
    with start(model, root, folder, "again", HYBRID, quota_gib=1) as told["again"]:
        yield told


def test_a_prompt_that_the_host_has_evicted_comes_from_nvme(dense: dict[str, Any]) -> None:
    """Cold, repeated, evicted from pool and host: the same token ids, and the last from this tier."""
    (cold, none), (repeat, _) = dense["answers"]
    evicted, tokens = dense["evicted"]
    assert cold == repeat == evicted and none == 0 and tokens >= 0.8 * LONG
    assert dense["numbers"].value("vllm:kv_offload_tiering_read_bytes_total", tier="1:NvmeTier") > 0
    assert dense["numbers"].value("kvtier_chunks_loaded_total") > 5


def test_the_quota_holds_over_a_longer_run_than_it_fits(dense: dict[str, Any]) -> None:
    """Never more on disk than the quota, and chunks went for it."""
    assert dense["evictions"] > 10
    assert 0.5 * QUOTA_GIB * 2**30 < dense["peak"] <= QUOTA_GIB * 2**30


def test_a_second_engine_beside_the_first_serves_its_prompts(dense: dict[str, Any]) -> None:
    """A new engine on the root of one that lives: what that one stored before, and what it stores now."""
    answer, tokens = dense["twin"].answer(prompt(30))
    assert answer == dense["last"][0] and tokens >= 0.8 * LONG
    fresh, _ = dense["first"].answer(prompt(40))
    dense["first"].wait_stored()
    answer, tokens = dense["twin"].answer(prompt(40))
    assert answer == fresh and tokens >= 0.8 * LONG


def test_a_hybrid_models_prompt_survives_its_engine(hybrid: dict[str, Any]) -> None:
    """Attention and states of one that was killed: the same token ids, from NVMe."""
    answer, tokens = hybrid["again"].answer(prompt(1))
    assert {tuple(told) for told in hybrid["answers"][1]} == {tuple(answer)}
    assert tokens >= 0.6 * LONG


@pytest.mark.parametrize(("seed", "states"), [(2, False), (3, True)], ids=["attention", "state"])
def test_a_damaged_chunk_of_either_kind_is_computed_again(hybrid: dict[str, Any], seed: int, states: bool) -> None:
    """The lookup promises it; the load finds out; the request completes with the right token ids, once and again."""
    engine = hybrid["again"]
    for path in hybrid["files"][seed]:
        is_state = int(path.name.split("-")[1], 16) % GROUPS >= FIRST_STATE
        if is_state is states and path.exists():
            DAMAGE["flipped"](path)
    corrupt = engine.metric("kvtier_chunks_corrupt_total")
    assert engine.answer(prompt(seed))[0] == hybrid["answers"][seed][0]
    assert engine.metric("kvtier_chunks_corrupt_total") > corrupt
    assert engine.answer(prompt(seed))[0] == hybrid["answers"][seed][0]
