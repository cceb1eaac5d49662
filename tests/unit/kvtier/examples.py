"""The boxes and wishes whose rendered plans lie in configs/examples/, kept equal by a test.

`python -m tests.unit.kvtier.examples` writes them again.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtier import facts as facts_file
from kvtier.plan.advice import from_log
from kvtier.plan.decide import plan
from kvtier.plan.result import Plan
from kvtier.plan.wishes import Wishes
from kvtier.render import lmcache_server
from kvtier.render.formats import FORMATS, render
from tests.unit.kvtier.boxes import UNIT

_SUFFIX = {
    "args": "sh",
    "yaml": "lmcache.yaml",
    "env": "env",
    "compose": "compose.yaml",
    "systemd": "service",
    "k8s": "k8s.yaml",
}


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One box with one model. Paths are those of the fixtures; the model's name is what a user would write."""

    name: str
    facts: str
    model: str
    shown_as: str
    wishes: Wishes
    log: str | None = None


EXAMPLES = (
    Example(
        name="dgx-spark-pair",
        facts="dgx-spark-pair",
        model="qwen3-gqa",
        shown_as="Qwen/Qwen3-32B",
        wishes=Wishes(nvme="/mnt/kv-cache", nvme_gib=512, max_model_len=131072, kv_cache_dtype="fp8"),
    ),
    Example(
        name="rtx-5090",
        facts="rtx-5090",
        model="qwen3_5-hybrid",
        shown_as="Qwen/Qwen3.8-27B-NVFP4",
        wishes=Wishes(ram_gib=32, kv_cache_dtype="fp8"),
    ),
    Example(
        name="arc-pro-b70",
        facts="arc-pro-b70",
        model="qwen3_5-hybrid-mtp",
        shown_as="Qwen/Qwen3.8-27B-GPTQ-Int4",
        log="arc-pro-b70-before.log",
        wishes=Wishes(ram_gib=16, nvme_gib=64, max_model_len=131072, kv_cache_dtype="fp8", spec="mtp", spec_tokens=4),
    ),
    Example(
        name="cpu-laptop",
        facts="cpu-only",
        model="llama-dense",
        shown_as="meta-llama/Llama-2-7b-hf",
        wishes=Wishes(nvme="/var/lib/kv-cache", nvme_gib=32, max_model_len=8192),
    ),
)


def make(example: Example, fixtures: Path) -> Plan:
    """The example's plan, from the fixtures of tests/unit."""
    wishes = example.wishes
    if example.log:
        figures = from_log(fixtures / "logs" / example.log)
        wishes = msgspec.structs.replace(wishes, figures=msgspec.structs.replace(figures, source=example.log))
    made = plan(
        facts_file.load(fixtures / "facts" / f"{example.facts}.json"), str(fixtures / "models" / example.model), wishes
    )
    command = [example.shown_as if word == made.model else word for word in made.command]
    return msgspec.structs.replace(made, model=example.shown_as, command=command)


def files(example: Example, fixtures: Path) -> dict[str, str]:
    """File name (below configs/examples/) to text, for every format and rank."""
    made = make(example, fixtures)
    ranks = range(max(len(made.nodes), 1))
    found = {}
    for form in FORMATS:
        if form == "yaml" and made.lmcache_config is None:
            continue
        for rank in ranks:
            stem = made.nodes[rank].name if made.nodes else "vllm"
            found[f"{example.name}/{stem}.{_SUFFIX[form]}"] = render(made, form, rank)
    return found


def server_files(fixtures: Path) -> dict[str, str]:
    """As `files`, for LMCache's server: alone, and with a Redis that several hosts share behind it."""
    made = make(next(example for example in EXAMPLES if example.name == "cpu-laptop"), fixtures)
    behind = {"alone": None, "behind-redis": "redis://kv.example:6379"}
    return {f"lmcache-server/{name}.sh": lmcache_server.render(made, url) for name, url in behind.items()}


if __name__ == "__main__":
    for made_files in (*(files(wanted, UNIT) for wanted in EXAMPLES), server_files(UNIT)):
        for name, text in made_files.items():
            path = UNIT.parents[1] / "configs" / "examples" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
