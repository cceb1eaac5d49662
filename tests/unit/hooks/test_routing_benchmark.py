"""The routing benchmark, on the first 400 requests of the Mooncake conversation trace (Apache-2.0)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRACE = Path(__file__).with_name("fixtures") / "conversation_400.jsonl"


@pytest.fixture(scope="module")
def routing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("routing_benchmark", ROOT / "benchmarks" / "routing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_table_and_json_have_every_policy(
    routing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run yields a row for every policy, in the table and in the JSON, and round robin keeps replicas 70 % busy."""
    target = tmp_path / "rows.json"
    routing.main(["--trace", str(TRACE), "--replicas", "4", "--json", str(target)])
    rows = {row["policy"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) == {
        *("prefix_affinity", "random", "round_robin", "least_busy", "session_sticky", "consistent_hash"),
        *("oracle", "shared_cache"),
    }
    printed = capsys.readouterr().out
    for name, row in rows.items():
        assert name in printed
        assert {"hit_ratio", "ttft_p50_s", "ttft_p99_s", "imbalance", "decision_us_p50"} <= set(row)
        assert row["hit_ratio"] <= rows["shared_cache"]["hit_ratio"] + 1e-9
    assert rows["round_robin"]["busy"] == pytest.approx(0.70, abs=0.01)


@pytest.mark.parametrize(("workers", "shared"), [(1, False), (4, False), (4, True)])
def test_hook_keeps_the_hits_of_one_cache_and_the_balance(routing: ModuleType, workers: int, shared: bool) -> None:
    """The hook's decision code keeps at least 90 % of one shared cache's hits on this short stretch, with better times
    to first token than round robin, also with workers that share nothing or what Redis carries."""
    requests = routing.load_trace(TRACE)
    shape = (4, routing.GPU_BLOCKS, routing.NVME_BLOCKS)
    rate = routing.calibrated_rate(requests, *shape)
    bound = routing.replay("shared_cache", requests, *shape, rate=rate)
    robin = routing.replay("round_robin", requests, *shape, rate=rate)
    hook = routing.replay("prefix_affinity", requests, *shape, rate=rate, workers=workers, shared=shared)
    assert hook.hit_ratio >= 0.90 * bound.hit_ratio
    assert hook.hit_ratio > 1.2 * robin.hit_ratio
    assert hook.ttft_p50_s < robin.ttft_p50_s
    assert hook.imbalance < 1.3


def test_cache_model_loses_the_tail_first(routing: ModuleType) -> None:
    """The simulated cache keeps the head of a prompt longest, and counts only unbroken prefixes."""
    cache = routing.Cache(gpu=2, nvme=2)
    cache.use([1, 2, 3])
    cache.use([1, 9, 8])
    assert cache.held([1, 2, 3]) == (2, 1)
    assert cache.held([7, 1, 2]) == (0, 0)
