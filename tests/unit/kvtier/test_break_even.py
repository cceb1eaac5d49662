"""Which hits are too short to load: `min_retrieve_tokens` from measured rates, and never from assumed ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from kvtier.cli import app
from kvtier.facts import Measured
from kvtier.plan import engine_rates
from kvtier.plan.engine_rates import EngineRates
from kvtier.plan.result import Plan
from kvtier.render.formats import render
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import UNIT, facts, model, planned

BOX, MODEL = "dgx-spark", "qwen3-gqa"


def least(plan: Plan) -> int | None:
    assert plan.lmcache_config is not None
    return plan.lmcache_config.get("min_retrieve_tokens")


def test_measured_rates_decide() -> None:
    """A load costs 50 ms and its bytes; the value is the first whole chunk count that beats the prefill, and the next
    smaller one does not."""
    rate, prefill = 5.0, 15_000.0
    plan = planned(BOX, MODEL, nvme_gbps=rate, prefill_tokens_per_s=prefill)
    found = least(plan)
    assert found is not None
    assert found % 256 == 0

    def load_s(tokens: int) -> float:
        return 0.05 + tokens * plan.kv_bytes_per_token / (rate * 1e9)

    assert load_s(found) < found / prefill
    assert load_s(found - 256) >= (found - 256) / prefill
    (reason,) = [reason for reason in plan.reasons if reason.rule == "short-hits-are-computed"]
    assert f"min_retrieve_tokens: {found}" in reason.sentence
    assert plan.estimates[0].pays_from_tokens == found


def test_the_facts_own_measurement_counts_like_a_given_rate() -> None:
    """What `kvtier detect --measure` wrote into the facts file decides in the same way."""
    measured = Measured(disk_read=5e9, prefill_tokens_per_s=15_000.0)
    box = msgspec.structs.replace(facts(BOX), measured=measured)
    assert least(planned(box, MODEL)) == least(planned(BOX, MODEL, nvme_gbps=5.0, prefill_tokens_per_s=15_000.0))


def test_an_assumed_rate_decides_nothing() -> None:
    """Without a measured drive or a known prefill rate, LMCache's default stands."""
    assert least(planned(BOX, MODEL)) is None
    assert least(planned(BOX, MODEL, prefill_tokens_per_s=15_000.0)) is None
    assert least(planned(BOX, MODEL, nvme_gbps=5.0)) is None


def test_where_every_hit_pays_nothing_is_set() -> None:
    """A prefill so slow that one chunk is loaded sooner."""
    assert least(planned(BOX, MODEL, nvme_gbps=5.0, prefill_tokens_per_s=500.0)) is None


def test_a_drive_slower_than_the_prefill_is_said() -> None:
    """No length pays: the plan warns, and does not set a limit that would hide it."""
    plan = planned(BOX, MODEL, nvme_gbps=0.1, prefill_tokens_per_s=50_000.0)
    assert plan.rule("tier-slower-than-prefill")
    assert least(plan) is None


def rates_file(folder: Path, tokens: int | None) -> Path:
    """As `benchmarks/engine_ttft.py --json` writes it, with the keys that matter here."""
    even = {"tokens": tokens, "prefill_tokens_per_s": 600.0, "load_tokens_per_s": 60_000.0, "load_fixed_s": 0.04}
    path = folder / "ttft.json"
    path.write_text(json.dumps({"rows": [], "machine": {"cores": 2}, "model": "tiny", "break_even": even}))
    return path


def test_an_engines_own_break_even_goes_before_estimates(tmp_path: Path) -> None:
    """The measured point is taken as it is, with its source named."""
    rates = engine_rates.read(rates_file(tmp_path, 768))
    plan = planned(BOX, MODEL, engine_rates=rates, nvme_gbps=5.0, prefill_tokens_per_s=15_000.0)
    assert least(plan) == 768
    assert "tiny in ttft.json" in next(r.sentence for r in plan.reasons if r.rule == "short-hits-are-computed")
    never = planned(BOX, MODEL, engine_rates=engine_rates.read(rates_file(tmp_path, None)))
    assert never.rule("tier-slower-than-prefill")


def test_it_reaches_every_hosts_file_and_the_rendered_yaml() -> None:
    """LMCache reads it on the scheduler's side: each host of a pair has it, and so has what `kvtier render` prints."""
    rates = EngineRates(1024, 600.0, 60_000.0, 0.04, "a test")
    pair = planned("dgx-spark-pair", MODEL, engine_rates=rates)
    assert [node.lmcache_config["min_retrieve_tokens"] for node in pair.nodes if node.lmcache_config] == [1024, 1024]
    plan = planned(BOX, MODEL, engine_rates=rates)
    assert yaml.safe_load(render(plan, "yaml"))["min_retrieve_tokens"] == 1024


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"break_even": {"tokens": -1}}', '{"break_even": 3}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """One error that names the option and what belongs there."""
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="engine_ttft"):
        engine_rates.read(path)
    with pytest.raises(ConfigError, match="--engine-rates"):
        engine_rates.read(tmp_path / "missing.json")


def test_explain_prints_the_rule(tmp_path: Path) -> None:
    """From the command line, by the file's name."""
    arguments = ["plan", model(MODEL), "--facts", str(UNIT / "facts" / f"{BOX}.json"), "--explain"]
    result = CliRunner().invoke(app, [*arguments, "--engine-rates", str(rates_file(tmp_path, 512))])
    assert result.exit_code == 0
    assert "short-hits-are-computed: min_retrieve_tokens: 512" in " ".join(result.output.split())
