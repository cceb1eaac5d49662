"""What the benchmarks compute from their samples: the share of fio's line, and the break-even."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import a benchmark as it is when run as a script: its own folder comes first."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        for module in (name, "rows", "machine"):
            sys.modules.pop(module, None)
        return importlib.import_module(name)

    return load


def test_the_line_is_the_job_count_with_the_best_median_and_shares_are_taken_round_by_round(load) -> None:
    """One lucky round of another job count does not raise the line; a slow round of the drive is slow for both."""
    rates_module = load("rates")
    figures = rates_module.Figures(nbytes=10**9)
    for subject, rates in {
        "fio-1": (1.0, 1.0, 9.0),  # lucky once
        "fio-2": (2.0, 1.0, 3.0),
        "nvme-backend": (1.9, 0.9, 2.7),
        "lmcache-fs": (0.5, 0.4, 0.6),
    }.items():
        for rate in rates:
            figures.add(subject, "load", rates_module.Sample(1 / rate, 0.1, 5 << 20, 9 << 20))
    assert figures.line("load") == "fio-2"
    rows = {row.subject: row for row in figures.rows(6 << 20, ("nvme-backend", "lmcache-local-disk", "lmcache-fs"))}
    assert rows["fio"].note == "2 jobs"
    assert rows["fio"].share_of_fio == 1.0
    assert rows["nvme-backend"].value == pytest.approx(1.9)
    assert rows["nvme-backend"].share_of_fio == pytest.approx(0.9)
    assert rows["nvme-backend"].peer_ratio == pytest.approx(1.9 / 0.5)
    assert rows["nvme-backend"].rss_growth_mib == 5
    assert rows["nvme-backend"].cpu_s_per_gb == pytest.approx(0.1)


def rows_of(engine_ttft, none: dict[int, float], tier: dict[int, float]):
    return [
        engine_ttft.Row(subject, "ttft after restart", size, seconds, "s")
        for subject, times in ((engine_ttft.NONE, none), (engine_ttft.TIER, tier))
        for size, seconds in times.items()
    ]


def test_the_break_even_is_where_the_tier_wins_from_then_on(load) -> None:
    """A win at a short length that a longer one loses again does not count; the tail is not part of the prefix."""
    engine_ttft = load("engine_ttft")
    none = {272: 0.3, 528: 0.4, 1040: 1.0, 4112: 4.0}
    found = engine_ttft.break_even(rows_of(engine_ttft, none, {272: 0.2, 528: 0.5, 1040: 0.3, 4112: 0.6}))
    assert found.tokens == 1024
    assert found.prefill_tokens_per_s == pytest.approx(3840 / 3.7)
    assert found.load_tokens_per_s == pytest.approx(3840 / 0.4)
    never = engine_ttft.break_even(rows_of(engine_ttft, none, {272: 1, 528: 1, 1040: 2, 4112: 5}))
    assert never.tokens is None


def test_a_documents_of_each_round_share_no_chunk(load) -> None:
    """No document of the benchmark finds another one's prefix in the pool or in a tier."""
    engine_ttft = load("engine_ttft")
    docs = engine_ttft.documents([256, 1024], 3, 1000, seed=2) + engine_ttft.documents([256, 1024], 3, 1000)
    assert len({doc.tokens[: engine_ttft.CHUNK_TOKENS] for doc in docs}) == len(docs)
    assert {len(doc.tokens) for doc in docs} == {272, 1040}


def test_the_json_holds_rows_and_machine_and_nothing_of_the_person(load, tmp_path) -> None:
    """The documented shape; no host name, user or path is in it."""
    rows, machine = load("rows"), load("machine")
    target = tmp_path / "out.json"
    facts = machine.machine(tmp_path)
    rows.write_json(target, [rows.Row("fio", "load", 1 << 20, 1.5, "GB/s", share_of_fio=1.0)], facts, rounds=3)
    found = json.loads(target.read_text())
    assert found["rows"] == [
        {"subject": "fio", "operation": "load", "size": 1 << 20, "value": 1.5, "unit": "GB/s", "share_of_fio": 1.0}
    ]
    assert found["rounds"] == 3
    assert found["machine"]["cores"] >= 1
    assert str(tmp_path) not in target.read_text()


def test_the_peak_of_memory_is_seen_although_it_is_given_back(load) -> None:
    """64 MiB that come and go between begin and end count."""
    machine = load("machine")
    with machine.peak_growth() as growth:
        block = bytearray(64 << 20)
        block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
        del block
    assert 50 << 20 < growth.nbytes < 120 << 20
