"""Metrics as snapshots, changes between them, the acid test's verdict, and what watch and doctor make of it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvtier.acid.client import Target, document
from kvtier.acid.result import Clues, Step, Verdict, judge, pool_kept
from kvtier.doctor.engine_checks import policy, running
from kvtier.observe.rates import change, ram_fill, troubles
from kvtier.observe.snapshot import Snapshot, root_of, take
from kvtier.scrape import Metrics
from kvtier.watch.view import Seen, render, rows
from tests.unit.kvtier.boxes import facts

NATIVE = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{source="local_compute"} 1000
vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 2000
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 3000
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{source="host"} 2500
vllm:prompt_tokens_cached_by_source_total{source="disk"} 500
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total 3000
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total 60000
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total 479
# TYPE vllm:kv_offload_cpu_cache_usage_perc gauge
vllm:kv_offload_cpu_cache_usage_perc 0.0
# TYPE vllm:kv_offload_store_bytes counter
vllm:kv_offload_store_bytes_total 98400000000
# TYPE vllm:kv_offload_store_time counter
vllm:kv_offload_store_time_total 8
# TYPE vllm:kv_offload_load_bytes counter
vllm:kv_offload_load_bytes_total 13400000000
# TYPE vllm:kv_offload_load_time counter
vllm:kv_offload_load_time_total 1
# TYPE vllm:kv_offload_tiering_write_bytes counter
vllm:kv_offload_tiering_write_bytes_total{tier="1:fs"} 77
# TYPE vllm:kv_offload_tiering_read_bytes counter
vllm:kv_offload_tiering_read_bytes_total{tier="1:fs"} 55
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{INFO} 1
""".replace(
    "INFO",
    'block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="235074",kv_cache_max_concurrency="3.587",'
    'gpu_memory_utilization="0.88"',
)
PLUGIN = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.1
# TYPE kvtier_used_bytes gauge
kvtier_used_bytes{rank="0"} 100
kvtier_used_bytes{rank="1"} 90
# TYPE kvtier_quota_bytes gauge
kvtier_quota_bytes{rank="0"} 1000
kvtier_quota_bytes{rank="1"} 1000
# TYPE kvtier_bytes_read counter
kvtier_bytes_read_total{rank="0"} 7
# TYPE kvtier_degraded gauge
kvtier_degraded{rank="0"} 1
"""


NOBODY = "http://203.0.113.1:1"
"""An address of the documentation range: no engine is there, and none on this host."""


def seen(text: str = NATIVE, **changes: Any) -> Snapshot:
    return msgspec.structs.replace(take(Metrics(text)), **changes)


def test_snapshot_of_a_native_engine() -> None:
    """Names and labels of 0.32 read as what they mean."""
    snapshot = seen()
    assert snapshot.figures.pool_tokens == 235074
    assert snapshot.figures.context == round(235074 / 3.587)
    assert (snapshot.running, snapshot.waiting["capacity"], snapshot.preemptions) == (3, 2, 479)
    assert (snapshot.computed, snapshot.from_tier, snapshot.cached["host"]) == (1000, 3000, 2500)
    assert (snapshot.disk_written_bytes, snapshot.disk_read_bytes) == (77, 55)
    assert snapshot.native and not snapshot.plugin


def test_snapshot_of_this_projects_tier() -> None:
    """A host-wide gauge that every rank tells is not summed; degraded shows."""
    snapshot = seen(PLUGIN)
    assert (snapshot.used_bytes, snapshot.quota_bytes, snapshot.plugin, snapshot.degraded) == (100, 1000, True, True)
    assert snapshot.loaded_bytes == snapshot.disk_read_bytes == 7


def test_older_engines_tell_tokens_by_hit_counters() -> None:
    """Without the metric by source, the hit counters leave what was computed; the older byte counters are read."""
    old = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc 0.1
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total 1000
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total 300
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total 500
# TYPE vllm:kv_offload_total_bytes counter
vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"} 9
vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"} 4
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
"""
    snapshot = seen(old)
    assert snapshot.tokens == {"local_compute": 200, "local_cache_hit": 300, "external_kv_transfer": 500}
    assert (snapshot.stored_bytes, snapshot.loaded_bytes, snapshot.figures.pool_tokens) == (9, 4, 1600)


def test_change_between_two_looks() -> None:
    """Shares and rates are of what moved in between; a restart's counters begin anew."""
    before = seen(at=10.0)
    after = msgspec.structs.replace(
        before,
        at=12.0,
        tokens={"local_compute": 1100, "local_cache_hit": 2000, "external_kv_transfer": 3300},
        loaded_bytes=before.loaded_bytes + 2_000_000_000,
        load_s=before.load_s + 0.1,
        preemptions=481,
    )
    moved = change(before, after)
    assert (moved.computed_share, moved.tier_share, moved.prompt_tokens_per_s) == (0.25, 0.75, 200.0)
    assert moved.load_rate == pytest.approx(2e10)
    assert moved.preemptions == 2
    fresh = msgspec.structs.replace(
        before, at=13.0, tokens={"local_compute": 10, "local_cache_hit": 0, "external_kv_transfer": 0}, preemptions=0
    )
    assert change(before, fresh).computed_share == 1.0


def test_ram_fill_is_an_upper_bound() -> None:
    """The native gauge reads 0.0 on a full tier: fill is min(tier, bytes stored since start), and says so."""
    snapshot = seen()
    assert ram_fill(snapshot, 32 << 30) == (32 << 30, True)
    assert ram_fill(snapshot, 1 << 40) == (98_400_000_000, True)
    assert ram_fill(seen(PLUGIN), 32 << 30) is None
    shown = dict(rows(Seen(url="x", snapshot=snapshot, change=change(snapshot, snapshot), ram_tier_bytes=32 << 30)))
    assert "at most 32 GiB of 32 GiB" in shown["RAM tier"] and "upper bound" in shown["RAM tier"]


def test_watch_says_what_is_bad() -> None:
    """Preemptions, waiting for capacity, low acceptance and little device memory are explained."""
    before = seen(at=1.0, drafted=100, accepted=90)
    after = msgspec.structs.replace(before, at=2.0, preemptions=500, drafted=200, accepted=100)
    said = " ".join(troubles(after, change(before, after), device_free=100 << 20))
    for word in ("preemptions", "capacity", "drafted", "device memory"):
        assert word in said
    console = Console(record=True, width=120)
    console.print(
        render(
            [Seen(url="http://a", snapshot=after, change=change(before, after)), Seen(url="http://b", error="refused")]
        )
    )
    text = console.export_text()
    assert "http://a" in text and "refused" in text and "50% of 235,074 tokens" in text


def test_doctor_of_a_running_engine() -> None:
    """A degraded tier and one that stores and never serves fail; preemptions warn; flags get numbers."""
    box = facts("rtx-5090")
    found = running(seen(), box, NOBODY)
    checks = {check.name: check for check in found}
    assert checks["tier"].status == "pass" and checks["hits"].status == "pass"
    assert checks["preemptions"].status == "warn"
    assert any("--gpu-memory-utilization 0.94 (is 0.88)" in check.sentence for check in found)
    never = {
        check.name: check
        for check in running(
            seen(external=(0, 60000), tokens={"local_compute": 60000, "local_cache_hit": 0, "external_kv_transfer": 0}),
            box,
            NOBODY,
        )
    }
    assert never["hits"].status == "fail"
    assert {check.name: check for check in running(seen(PLUGIN), box, NOBODY)}["tier"].status == "fail"


def test_failure_policy_from_a_command_line() -> None:
    """The default policy fails the check; recompute passes; an engine that cannot be seen is said to be unseen."""
    base = ["vllm", "serve", "m", "--kv-transfer-config"]
    assert policy([*base, '{"kv_connector":"X"}']).status == "fail"
    assert policy([*base, '{"kv_load_failure_policy":"recompute"}']).status == "pass"
    assert policy(None).status == "warn"


def step(name: str, **moved: Any) -> Step:
    values: dict[str, Any] = dict(
        name=name,
        seconds=1.0,
        prompt_tokens=1000,
        computed=1000,
        from_pool=0,
        from_tier=0,
        from_tier_by={},
        stored_bytes=0,
        loaded_bytes=0,
        disk_written_bytes=0,
        disk_read_bytes=0,
    )
    return Step(**{**values, **moved})


def clues(**known: Any) -> Clues:
    values: dict[str, Any] = dict(
        native=False, plugin=False, degraded=False, drafts=False, version="0.32.0", load_failures=0
    )
    return Clues(**{**values, **known})


COLD, REPEAT = step("cold", stored_bytes=10**9), step("repeat", computed=10, from_pool=990)


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([COLD, REPEAT, step("after-pressure", computed=16, from_tier=984, loaded_bytes=10**9)], Verdict.RAM),
        ([COLD, REPEAT, step("after-pressure", computed=16, from_tier=984, from_tier_by={"disk": 984})], Verdict.NVME),
        ([COLD, REPEAT, step("after-pressure", computed=16, from_tier=984, disk_read_bytes=10**9)], Verdict.NVME),
        ([COLD, REPEAT, step("after-pressure", from_tier=984), step("after-restart", from_tier=984)], Verdict.NVME),
        ([COLD, REPEAT, step("after-pressure", from_tier=984), step("after-restart")], Verdict.RAM),
        ([COLD, REPEAT, step("after-pressure")], Verdict.STORES_ONLY),
        ([step("cold"), REPEAT, step("after-pressure")], Verdict.NO_TIER),
    ],
)
def test_verdicts(steps: list[Step], verdict: Verdict) -> None:
    """RAM, NVMe (by source, by bytes read, or by surviving a restart), stores only, and no tier."""
    assert judge(steps, clues())[0] is verdict


def test_likely_causes() -> None:
    """The upstream bug (for the releases that have it), a kept pool, a degraded tier and the hash seed are named."""
    steps = [COLD, REPEAT, step("after-pressure")]
    assert any("52771" in cause for cause in judge(steps, clues(native=True, drafts=True, version="0.27.1"))[2])
    assert not any("52771" in cause for cause in judge(steps, clues(native=True, drafts=True, version="0.30.0"))[2])
    assert any("degraded" in cause for cause in judge(steps, clues(plugin=True, degraded=True))[2])
    kept = [COLD, REPEAT, step("after-pressure", from_pool=900, computed=100)]
    assert pool_kept(kept)
    assert any("--pressure-tokens" in cause for cause in judge(kept, clues())[2])
    assert any("PYTHONHASHSEED" in cause for cause in judge([*steps, step("after-restart")], clues(plugin=True))[2])


def test_documents_share_no_prefix() -> None:
    """Two documents differ within their first block, and the same seed gives the same one."""
    assert document(64, 1)[:16] != document(64, 2)[:16]
    assert document(64, 1) == document(64, 1)


def test_root_of_an_address() -> None:
    """/v1, /metrics and a trailing slash are taken off."""
    assert {
        root_of(text) for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/metrics")
    } == {"http://h:1"}


def test_stream_is_cut_at_line_feeds_alone() -> None:
    """A text with other line ends in it (NEL, line separator, form feed) does not break the stream's events."""
    body = json.dumps({"choices": [{"text": "a\x85b\u2028c\x0cd"}]}, ensure_ascii=False)
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3}})

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("application/json", json.dumps({"data": [{"id": "m", "max_model_len": 64}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer("text/event-stream", f"data: {body}\n\ndata: {usage}\n\ndata: [DONE]\n\n")

        def _answer(self, kind: str, text: str) -> None:
            raw = text.encode()
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        target = Target(f"http://127.0.0.1:{server.server_port}")
        assert (target.model, target.context) == ("m", 64)
        assert target.ask([1, 2, 3]).prompt_tokens == 3
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
