"""Every box x every model against tests/unit/decisions.txt, and what holds for all of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtier.facts import Memory
from kvtier.plan.result import Decision
from tests.unit.kvtier.boxes import BOXES, MODELS, UNIT, argument, facts, planned


def _table() -> dict[tuple[str, str], str]:
    lines = [line for line in (UNIT / "decisions.txt").read_text().splitlines() if line and not line.startswith("#")]
    models = lines[0].split()[1:]
    return {
        (words[0], model): cell
        for line in lines[1:]
        for words in [line.split()]
        for model, cell in zip(models, words[1:], strict=True)
    }


TABLE = _table()


def _plan(box: str, model: str, **wishes: object):
    return planned(box, model, spec="mtp" if model.endswith("-mtp") else None, **wishes)


def test_table_has_every_box_and_model() -> None:
    """The table has a row for each facts file and a column for each model, and none besides."""
    assert set(TABLE) == {(box, model) for box in BOXES for model in MODELS}


@pytest.mark.parametrize(("box", "model"), sorted(TABLE))
def test_decision_is_the_tables(box: str, model: str) -> None:
    """The plan decides as the table says, and names the rule where it refuses."""
    plan = _plan(box, model)
    shown = f"no:{plan.reasons[-1].rule}" if plan.decision is Decision.REFUSED else plan.decision.value
    assert shown == TABLE[box, model]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("model", MODELS)
def test_unified_memory_never_gets_ram(box: str, model: str) -> None:
    """On unified memory no plan holds a RAM tier, and asking for one is refused."""
    if facts(box).memory is not Memory.UNIFIED:
        return
    assert all(tier.name != "ram" for tier in _plan(box, model).tiers)
    asked = _plan(box, model, ram_gib=4)
    assert asked.decision is Decision.REFUSED
    assert asked.rule("unified-refuses-ram")
    assert asked.vllm_args == []


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("model", MODELS)
def test_pool_holds_one_full_context(box: str, model: str) -> None:
    """Where a plan knows its pool, one context of the length that the engine will take fits, and the plan says so
    where that is less than the model's own."""
    for plan in (_plan(box, model), _plan(box, model, kv_cache_dtype="fp8")):
        pool = next((tier for tier in plan.tiers if tier.name == "pool"), None)
        if pool is None or not plan.kv_bytes_per_token:
            continue
        assert pool.tokens >= plan.max_model_len
        if plan.rule("context-fits-pool"):
            assert argument(plan, "--max-model-len") == str(plan.max_model_len)
            assert plan.max_model_len % 256 == 0 and plan.max_model_len >= 2048


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("model", MODELS)
def test_ram_tier_leaves_the_reserve_and_fits_shm(box: str, model: str) -> None:
    """A RAM tier never takes more than is available beside the reserve, nor than /dev/shm has free."""
    known = facts(box)
    for tier in _plan(box, model).tiers:
        if tier.name == "ram":
            assert tier.bytes + 8 * 2**30 <= known.ram_available
            if known.devices[0].vendor != "amd":
                assert tier.bytes < known.shm_free


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("model", MODELS)
def test_size_flag_and_transfer_config_never_together(box: str, model: str) -> None:
    """One size flag silently overwrites the connector: no plan emits both, nor disables the hybrid manager."""
    for plan in (_plan(box, model), _plan(box, model, nvme="/data/kv", nvme_gib=50)):
        assert not (argument(plan, "--kv-offloading-size") and argument(plan, "--kv-transfer-config"))
        assert "--disable-hybrid-kv-cache-manager" not in plan.vllm_args


@pytest.mark.parametrize("box", BOXES)
def test_plan_survives_json(box: str) -> None:
    """A plan and its facts come back equal from JSON."""
    from kvtier.facts import Facts
    from kvtier.plan.result import Plan

    plan = _plan(box, "qwen3-gqa")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert msgspec.json.decode(msgspec.json.encode(facts(box)), type=Facts) == facts(box)


def test_facts_files_are_what_their_builder_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts files are what _build.py writes, so that a stored memory kind is what today's rules say."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("facts_build", UNIT / "facts" / "_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    module.main()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in (UNIT / "facts").glob("*.json")
    }
