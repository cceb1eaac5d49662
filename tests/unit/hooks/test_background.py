"""What runs behind the requests: the decision log, the look at replicas' metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from litellm_hooks.decision_log import DecisionLog
from litellm_hooks.replica_poll import Reading, metrics_url, parse_metrics


def test_log_rotates_and_keeps_as_many_files_as_told(tmp_path: Path) -> None:
    """Every line is JSON, the files stay near their size, and the oldest are gone."""
    log = DecisionLog(tmp_path / "decisions.jsonl", max_bytes=2000, files=3)

    async def fill() -> None:
        for number in range(400):
            log.put(number=number)
            if number % 20 == 0:
                await log.flush()
        await log.flush()

    asyncio.run(fill())
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert len(files) == 3
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert max(line["number"] for line in lines) == 399
    assert all(path.stat().st_size < 4000 for path in files)


def test_log_never_grows_without_bound(tmp_path: Path) -> None:
    """Lines that nobody writes out are dropped and counted, not kept for ever."""
    log = DecisionLog(tmp_path / "x.jsonl", max_bytes=1000, files=1)
    for number in range(12_000):
        log.put(number=number)
    assert log.dropped == 2000


def test_metrics_are_read_as_vllm_writes_them() -> None:
    """Sums over engines, the highest KV usage, unknown and broken lines skipped."""
    text = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prompt_tokens_total{engine="0"} 1.2e+06
process_start_time_seconds 1.7e+09
vllm:num_requests_running{engine="2"} many
"""
    assert parse_metrics(text) == Reading(5.0, 1.0, 0.75, 1.2e6, 1.7e9)
    assert parse_metrics("nonsense\n\n{}\n") == Reading()


@pytest.mark.parametrize(
    ("earlier", "now", "restarted"),
    [
        (Reading(started_at=100.0), Reading(started_at=200.0), True),
        (Reading(started_at=100.0), Reading(started_at=100.0), False),
        (Reading(prompt_tokens=50.0), Reading(prompt_tokens=10.0), True),
        (Reading(prompt_tokens=50.0), Reading(prompt_tokens=60.0), False),
        (Reading(), Reading(started_at=100.0), False),
    ],
)
def test_restart_is_seen(earlier: Reading, now: Reading, restarted: bool) -> None:
    """A later start or a counter that fell is a new life; a first reading is not."""
    assert now.restarted_since(earlier) is restarted


def test_metrics_lie_beside_v1() -> None:
    """vLLM serves /metrics at its root."""
    assert metrics_url("http://a:8000/v1/") == metrics_url("http://a:8000") == "http://a:8000/metrics"
