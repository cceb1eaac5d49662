"""What the acid test saw, and the verdict on it: pure functions over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

_SERVED_SHARE = 0.5
"""Of the document's tokens. A chunk's remainder and the last block are always computed; half is far from both none
and all."""


class Verdict(StrEnum):
    """What stands behind the pool."""

    NVME = "serves from NVMe"
    RAM = "serves from RAM"
    STORES_ONLY = "stores but never serves"
    NO_TIER = "no tier"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One request for the document (or the pressure), with what the engine's metrics moved by meanwhile."""

    name: str
    """cold, repeat, pressure, after-pressure, after-restart."""
    seconds: float
    """Until the first token; of the pressure: until the last request's end."""
    prompt_tokens: int
    computed: int
    from_pool: int
    from_tier: int
    from_tier_by: dict[str, int]
    """Tokens from a tier by the engine's own word (host, disk, external_unspecified), where it has one."""
    stored_bytes: int
    loaded_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Several long contexts at once."""

    requests: int
    tokens_each: int
    completed: int
    failed: int
    preemptions: int
    seconds: list[float]
    """Of each request that completed, until its end."""
    queue_s_mean: float | None
    prefill_tokens_per_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The whole test."""

    url: str
    engine: str
    pool_tokens: int | None
    steps: list[Step]
    parallel: Parallel | None
    verdict: Verdict
    why: str
    likely_causes: list[str]

    @property
    def passed(self) -> bool:
        return self.verdict in (Verdict.NVME, Verdict.RAM)


class Clues(msgspec.Struct, frozen=True, kw_only=True):
    """What else is known of the engine, for the likely cause."""

    native: bool
    plugin: bool
    degraded: bool
    drafts: bool
    """Speculative decoding is on."""
    version: str
    load_failures: int


def judge(steps: Sequence[Step], clues: Clues) -> tuple[Verdict, str, list[str]]:
    """The verdict, one sentence that says what it rests on, and the likely causes where nothing was served.

    Only the steps after eviction and after a restart count: in a repeat the pool itself answers. What an engine serves
    after a restart cannot come from RAM, whatever it calls the source.
    """
    evidence = [step for step in steps if step.name in ("after-pressure", "after-restart")]
    serving = [step for step in evidence if step.from_tier >= _SERVED_SHARE * step.prompt_tokens]
    restarted = next((step for step in serving if step.name == "after-restart"), None)
    from_disk = restarted or next((step for step in serving if _reads_disk(step)), None)
    if from_disk:
        return Verdict.NVME, _served(from_disk, "NVMe"), []
    if serving:
        return Verdict.RAM, _served(serving[0], "RAM"), _only_ram(steps)
    stored = sum(step.stored_bytes for step in steps)
    part = max(evidence, key=lambda step: step.from_tier, default=None)
    if stored or clues.native or clues.plugin:
        some = (
            f", {part.from_tier:,} of {part.prompt_tokens:,} tokens served"
            if part and part.from_tier
            else ", no token served"
        )
        return (
            Verdict.STORES_ONLY,
            f"{stored / 1e6:,.0f} MB left the pool for a tier{some} when the pool had lost the document",
            _causes(steps, clues),
        )
    return Verdict.NO_TIER, "nothing left the pool for a tier, and no tier shows in the metrics", _no_tier(clues)


def pool_kept(steps: Sequence[Step]) -> bool:
    """Whether the pool still held the document after the pressure, so that nothing was proven."""
    return any(step.name == "after-pressure" and step.from_pool >= _SERVED_SHARE * step.prompt_tokens for step in steps)


def _reads_disk(step: Step) -> bool:
    return step.from_tier_by.get("disk", 0) > 0 or step.disk_read_bytes > 0


def _served(step: Step, where: str) -> str:
    moved = step.disk_read_bytes or step.loaded_bytes
    share = f"{step.from_tier:,} of {step.prompt_tokens:,} tokens"
    return f"{step.name}: {share} from {where} ({moved / 1e6:,.0f} MB read) in {step.seconds:.2f} s"


def _only_ram(steps: Sequence[Step]) -> list[str]:
    after = next((step for step in steps if step.name == "after-restart"), None)
    if after is None:
        return ["not restarted: give --restart-command to see whether a disk tier survives"]
    return [
        "after the restart nothing was served: there is no disk tier, or its files were not found (PYTHONHASHSEED, "
        "another configuration)"
    ]


def _causes(steps: Sequence[Step], clues: Clues) -> list[str]:
    from kvtier.units import version_tuple

    found = []
    if pool_kept(steps):
        found.append(
            "the pool still held the document after the pressure, so nothing is proven yet: give a larger "
            "--pressure-tokens"
        )
    if clues.degraded:
        found.append("the tier is degraded: the engine's log says why")
    if clues.drafts and (0, 24, 0) <= version_tuple(clues.version) < (0, 30, 0):
        found.append(
            f"vLLM {clues.version} with speculative decoding: on a hybrid model 0.24 to 0.29 store and never serve "
            "(kvtier patch apply vllm-52771)"
        )
    if clues.load_failures:
        found.append(f"{clues.load_failures} loads failed: see the engine's log and the disk")
    restarted = next((step for step in steps if step.name == "after-restart"), None)
    if restarted and not any(step.name == "after-pressure" and step.from_tier for step in steps):
        found.append(
            "keys differ between runs: set PYTHONHASHSEED=0 for every process, and keep the configuration the same"
        )
    if clues.native and not found:
        found.append(
            "the tier may be smaller than the pressure, so that what it stored was evicted before it was asked for; "
            "or lookups miss what was stored"
        )
    return found or [
        "lookups miss what was stored: compare the hash seed, the hash algorithm and the model's configuration of "
        "both runs"
    ]


def _no_tier(clues: Clues) -> list[str]:
    return [
        "no connector is configured, or LMCache started in degraded mode, which serves without any cache and does not "
        "fail: "
        'look for "degraded mode" in the log, and at `kvtier doctor --url`'
    ]
