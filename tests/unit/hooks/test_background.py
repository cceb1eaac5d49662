"""What runs behind the requests: the decision log, the look at replicas' metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from litellm_hooks.affinity import Affinity
from litellm_hooks.decision_log import DecisionLog
from litellm_hooks.ledger import ServerLoad
from litellm_hooks.prefix import Prefix
from litellm_hooks.replica import Replica
from litellm_hooks.replica_poll import Reading, ReplicaPoll, metrics_url, parse_metrics
from litellm_hooks.settings import KvTier, Settings
from litellm_hooks.shared_state import Place


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
vllm:num_requests_waiting{engine="2"} NaN
vllm:kv_cache_usage_perc{engine="2"} +Inf
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


def test_slow_or_dead_replica_is_a_reading_of_none() -> None:
    """A replica that answers is read; one that hangs costs its time-out and no more; one that is gone costs nothing."""

    async def serve(answer: bytes | None) -> tuple[asyncio.Server, str]:
        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(Exception):
                await reader.readuntil(b"\r\n\r\n")
                if answer is None:
                    await asyncio.sleep(30)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
                    await writer.drain()
            writer.close()

        server = await asyncio.start_server(client, "127.0.0.1", 0)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def work() -> dict[str, Reading | None]:
        seen: dict[str, Reading | None] = {}
        alive, alive_url = await serve(b"vllm:num_requests_waiting 4.0\n")
        hung, hung_url = await serve(None)
        poll = ReplicaPoll(
            60.0, 0.3, lambda: [alive_url, hung_url, "http://127.0.0.1:9/v1", "no-address"], seen.__setitem__
        )
        task = asyncio.create_task(poll.run())
        began = time.monotonic()
        while len(seen) < 3 and time.monotonic() - began < 10:
            await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        alive.close()
        hung.close()
        return {"alive": seen[alive_url], "hung": seen[hung_url], "gone": seen["http://127.0.0.1:9/v1"]}

    found = asyncio.run(work())
    assert found["alive"] == Reading(waiting=4.0)
    assert found["hung"] is None
    assert found["gone"] is None


@pytest.mark.parametrize(("tier", "kept"), [("nvme", True), ("ram", False), ("none", False)])
def test_polled_restart_forgets_unless_the_tier_survives(tier: KvTier, kept: bool) -> None:
    """A restart seen in a replica's metrics ends its claims, unless it has an NVMe tier."""
    mind = Affinity(Settings())
    mind.know([Replica("http://a", "a", tier)])
    prefix = Prefix([1, 2], [10, 20], 0, 1)
    mind.table.record(prefix, "http://a")
    mind.polled("http://a", Reading(started_at=100.0))
    assert mind.table.longest(prefix, ["http://a"])
    mind.polled("http://a", Reading(started_at=200.0))
    assert bool(mind.table.longest(prefix, ["http://a"])) is kept


def test_polled_load_counts_only_what_is_not_ours() -> None:
    """Requests that this worker leased are not counted again; without an answer nothing is counted."""
    mind = Affinity(Settings())
    mind.ledger.take("x", "http://a", 100.0, mind.clock())
    mind.polled("http://a", Reading(running=1.0, waiting=3.0, kv_usage=0.99))
    load: ServerLoad = mind.ledger.load("http://a")
    assert (load.polled_waiting, load.pressed) == (3, True)
    mind.polled("http://a", None)
    assert (load.polled_waiting, load.pressed) == (0, False)


def test_placement_of_one_worker_is_known_to_another() -> None:
    """What a worker tells of a placement lets another find the session's next turn, also after very long prompts."""
    prefix = Prefix(list(range(1, 501)), [10 * i for i in range(1, 501)], 0, 1)
    mind = Affinity(Settings())
    mind.heard_places([Place.of(prefix, -1, "a")])
    turn = Prefix([*prefix.keys, 900, 901], [*prefix.ends, 6000, 6010], 0, 1)
    assert mind.table.longest(turn, ["a", "b"]) == {"a": 499}
    assert len(Place.of(prefix, -1, "a").keys) == 32
    assert Place.of(turn, 499, "a").keys == [900, 901]
