"""vLLM's own offloading over NVMe without a CPU tier, with a hybrid model in the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.engine import Engine, EngineSpec, EngineStartError
from kvtier.model import find_model
from tests.engine.conftest import Tiered

BLOCK = 256  # tokens: what this hybrid's pages come to
TOKENS = 2_600
WHOLE = TOKENS // BLOCK * BLOCK
GROUPS = 4  # attention, and three of recurrent layers


def transfer(root: Path, **extra: Any) -> dict[str, Any]:
    """What a person writes for --kv-transfer-config."""
    return {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_connector_module_path": "lmcache_nvme_backend",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "NvmeOffloadingSpec",
            "spec_module_path": "lmcache_nvme_backend",
            "root_dir": str(root),
            "quota_gib": 1,
            "staging_mib": 8,
            **extra,
        },
    }


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start_native(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A context manager that starts the hybrid model with this door on a root."""

    @contextmanager
    def start(root: Path, **changes: Any) -> Iterator[Tiered]:
        spec = EngineSpec(
            model=find_model("hybrid", lambda _: None),
            log=tmp_path_factory.mktemp("native") / "engine.log",
            args=("--dtype", "bfloat16", "--kv-transfer-config", json.dumps({**transfer(root), **changes})),
            env={"VLLM_SERVER_DEV_MODE": "1"},
            max_model_len=4096,
            max_num_batched_tokens=1024,
            ready_timeout_s=600,
        )
        engine = Engine(spec)
        try:
            yield Tiered(engine, root)
        finally:
            engine.stop()

    return start


def prompt(seed: int = 0, tokens: int = TOKENS) -> list[int]:
    return [10 + (seed * 7919 + i * 31 + i // 7 * 5) % 300 for i in range(tokens)]


def token_ids(served: Tiered, asked: list[int]) -> list[int]:
    """The ids of a greedy answer."""
    body = {
        "model": served.engine.spec.served_name, "prompt": asked, "max_tokens": 8, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{served.engine.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    return list(answer["choices"][0]["token_ids"])


def from_tier(served: Tiered, asked: list[int]) -> tuple[list[int], int]:
    """The answer, and the prompt tokens that vLLM counts as loaded from the tier."""
    before = served.tokens("external_kv_transfer")
    answer = token_ids(served, asked)
    return answer, int(served.tokens("external_kv_transfer") - before)


def damage(served: Tiered, group: int) -> None:
    """Flip a byte of a chunk that the prompt needs, of one group."""
    depths = {path: int(path.name.split("-")[1], 16) for path in served.root.glob("v1/*/*/*.kv")}
    path = max((path for path in depths if depths[path] % GROUPS == group), key=depths.__getitem__)
    data = bytearray(path.read_bytes())
    data[4096 + 64] ^= 0xFF
    path.write_bytes(data)


def test_a_hybrid_model_is_served_from_the_drive_alone(start_native: Start, tmp_path: Path) -> None:
    """Cold, repeated, evicted and restarted: the same token ids; and a damaged chunk of each group costs a recompute,
    once, with the right tokens."""
    with start_native(tmp_path) as served:
        cold, loaded = from_tier(served, prompt())
        assert loaded == 0
        assert from_tier(served, prompt()) == (cold, 0)  # vLLM's own prefix cache
        served.wait_stored()
        served.forget()
        assert from_tier(served, prompt()) == (cold, WHOLE)
        for group in range(GROUPS):
            damage(served, group)
            served.forget()
            failed = served.metric("kvtier_chunks_load_failed_total", cause="payload checksum") if group else 0
            answer, _ = from_tier(served, prompt())
            assert answer == cold, f"group {group}"
            assert served.metric("kvtier_chunks_load_failed_total", cause="payload checksum") == failed + 1
            served.wait_stored()
            served.forget()
            assert from_tier(served, prompt()) == (cold, WHOLE), f"group {group}: not stored again"
        assert served.metric("kvtier_staging_bytes") == 8 << 20
        assert served.engine.metrics().value("vllm:kv_offload_load_bytes_total") > 0
    with start_native(tmp_path) as served:
        assert from_tier(served, prompt()) == (cold, WHOLE)
        assert served.metric("kvtier_chunks_load_failed_total", cause="absent") == 0


@pytest.mark.long
def test_two_engines_on_one_root_serve_each_other(start_native: Start, tmp_path: Path) -> None:
    """Both live: what one stores the other loads, either way and without being told, with the same token ids."""
    with start_native(tmp_path) as first, start_native(tmp_path) as second:
        for asking, storing, seed in ((second, first, 0), (second, first, 1), (first, second, 2)):
            cold, loaded = from_tier(storing, prompt(seed))
            assert loaded == 0
            storing.wait_stored()
            assert from_tier(asking, prompt(seed)) == (cold, WHOLE)
            assert from_tier(storing, prompt(seed)) == (cold, 0)


def test_what_would_end_requests_ends_the_start(start_native: Start, tmp_path: Path) -> None:
    """In the front process, with the reason as the last line."""
    with pytest.raises(EngineStartError) as caught, start_native(tmp_path, kv_load_failure_policy="fail"):
        pass
    assert "kv_load_failure_policy: found 'fail'; allowed: recompute." in str(caught.value).splitlines()[-1]
