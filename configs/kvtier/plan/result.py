"""A plan: the decision, why, and everything that follows from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Decision(StrEnum):
    """Which tier stands behind the KV pool."""

    NATIVE_RAM = "native-ram"
    NATIVE_RAM_NVME = "native-ram-nvme"
    LMCACHE_NVME = "lmcache-nvme"
    NATIVE_NVME = "native-nvme"
    NVME_SPEC = "nvme-spec"
    NONE = "none"
    REFUSED = "refused"


class Effect(StrEnum):
    """What a rule did."""

    CHOSE = "chose"
    REFUSED = "refused"
    CHANGED = "changed"
    WARNED = "warned"
    NOTED = "noted"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that applied, by name, and its sentence."""

    rule: str
    effect: Effect
    sentence: str


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: its size and what fits in it."""

    name: str
    bytes: int
    tokens: int
    full_contexts: float
    path: str | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A command for a person to run, and what it is for."""

    why: str
    command: str
    required: bool = False


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another way, with what it loses."""

    name: str
    loses: str
    how: str


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """An upstream fix that the target release lacks."""

    name: str
    fixes: str
    state: str
    """What kvpatches says of the installed vLLM, such as applied or needed; not-checked where the facts lack it."""


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one host of several runs."""

    name: str
    rank: int
    vllm_args: list[str]
    env: dict[str, str]
    lmcache_config: dict[str, Any] | None
    check: str
    """The command, run on that host once it serves, that shows whether the environment reached the engine's process."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Restore against re-prefill, per tier. Times are for one request of `tokens` tokens."""

    tier: str
    rate_bytes_per_s: float
    rate_source: str
    tokens: int
    restore_s: float
    prefill_s: float | None
    """None where no prefill rate is known."""
    pays_from_tokens: int | None
    """Prompt length from which a restore beats a prefill; None where it never does or the prefill rate is not known."""
    break_even_prefill_tokens_per_s: float
    """The tier pays on long prompts wherever prefill is slower than this."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``kvtier plan``. Byte counts are over all ranks unless said."""

    decision: Decision
    model: str
    box: str
    memory: str
    vendor: str | None = None
    """Of the device: nvidia, amd, intel, or None on a CPU."""
    world_size: int = 1
    target_vllm: str
    reasons: list[Reason]
    command: list[str] = []
    """How the model is served; `vllm_args` come after it."""
    vllm_args: list[str] = []
    """Arguments after the model. With several nodes those of rank 0; see `nodes`."""
    env: dict[str, str] = {}
    lmcache_config: dict[str, Any] | None = None
    kv_bytes_per_token: int = 0
    draft_kv_bytes_per_token: int = 0
    kv_formula: str = ""
    hybrid: bool = False
    max_model_len: int = 0
    tiers: list[Tier] = []
    estimates: list[Estimate] = []
    steps: list[Step] = []
    patches: list[Patch] = []
    alternatives: list[Alternative] = []
    nodes: list[NodePlan] = []

    @property
    def serves(self) -> bool:
        """Whether an engine can be started from this plan."""
        return self.decision is not Decision.REFUSED

    @property
    def needs_package(self) -> bool:
        """Whether the engine loads code of this project."""
        return self.decision in (Decision.LMCACHE_NVME, Decision.NVME_SPEC)

    @property
    def warnings(self) -> list[Reason]:
        return [reason for reason in self.reasons if reason.effect is Effect.WARNED]

    def rule(self, name: str) -> Reason | None:
        """The reason that a rule left, or None where the rule did not apply."""
        return next((reason for reason in self.reasons if reason.rule == name), None)
