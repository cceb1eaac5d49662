"""The fixtures of this folder's tests: facts files, models, and a short way to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier import facts as facts_file
from kvtier.facts import Facts
from kvtier.plan.decide import plan
from kvtier.plan.result import Plan
from kvtier.plan.wishes import Wishes

UNIT = Path(__file__).resolve().parents[1]
BOXES = tuple(sorted(path.stem for path in (UNIT / "facts").glob("*.json")))
MODELS = tuple(sorted(path.name for path in (UNIT / "models").iterdir()))


def facts(box: str) -> Facts:
    return facts_file.load(UNIT / "facts" / f"{box}.json")


def model(name: str) -> str:
    return str(UNIT / "models" / name)


def planned(box: str | Facts, name: str, **wishes: Any) -> Plan:
    """The plan for a box (by name, or changed facts) and a model."""
    return plan(facts(box) if isinstance(box, str) else box, model(name), Wishes(**wishes))


def argument(plan: Plan, flag: str) -> str | None:
    """The value after a flag; None where the flag is absent."""
    args = plan.vllm_args
    return args[args.index(flag) + 1] if flag in args else None
