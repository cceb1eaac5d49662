"""Speculative decoding: the argument for it, and the upstream bug that it meets on hybrid models."""

from __future__ import annotations

import json

from kvtier.plan.draft import Draft
from kvtier.plan.result import Decision, Effect, Patch
from kvtier.units import version_tuple
from lmcache_nvme_backend.errors import ConfigError

_AFFECTED = ((0, 24, 0), (0, 30, 0))
"""Bisected on released wheels: 0.24.0 to 0.29.0 store and never serve; 0.30.0 and later serve."""
_DRAFTED = {"mtp", "eagle", "eagle3"}
_FIXES = {
    "vllm-52771": "stores and never serves with drafted tokens on a hybrid model (vLLM issue 52735)",
    "vllm-52807": "an assertion that ends the engine on a partial hit, which shows once hits happen",
}
APPLIED = {"applied", "fixed-upstream", "not-affected"}
"""States of kvpatches that leave nothing to do."""


def arguments(draft: Draft) -> None:
    """Emit --speculative-config for a method that needs no second model's name; refuse MTP where there is none."""
    method = draft.wishes.spec
    if method is None:
        return
    if method == "mtp" and draft.geometry.draft_layers == 0:
        raise ConfigError(
            "--spec",
            "'mtp'",
            "a method that the model has layers for",
            f"{draft.checkpoint.name} brings no MTP layers: leave --spec out.",
        )
    if method == "mtp":
        value = json.dumps({"method": "mtp", "num_speculative_tokens": draft.wishes.spec_tokens}, separators=(",", ":"))
        draft.args += ["--speculative-config", value]
        draft.say(
            "draft-layers-keep-kv",
            Effect.NOTED,
            f"{draft.geometry.draft_layers} MTP layer(s) keep "
            f"{draft.draft_bytes:,} B a token beside the model's {draft.geometry.bytes_per_token:,}; tiers are counted "
            "with both.",
        )
        return
    draft.say(
        "speculative-config-is-yours",
        Effect.NOTED,
        f"--spec {method} is planned for; give --speculative-config with your draft model after `--`.",
    )


def patches(draft: Draft) -> None:
    """What a native tier behind a hybrid model with drafted tokens needs on the target release."""
    if (
        draft.wishes.spec not in _DRAFTED
        or not draft.geometry.hybrid
        or draft.decision not in (Decision.NATIVE_RAM, Decision.NATIVE_RAM_NVME)
    ):
        return
    if not _AFFECTED[0] <= version_tuple(draft.target) < _AFFECTED[1]:
        draft.say(
            "spec-decode-on-hybrid",
            Effect.NOTED,
            f"vLLM {draft.target} is not one of the releases (0.24 to 0.29) that store and never serve with drafted "
            "tokens on a hybrid model.",
        )
        return
    draft.patches = [Patch(name=name, fixes=fixes, state=_state(draft, name)) for name, fixes in _FIXES.items()]
    states = ", ".join(f"{patch.name}: {patch.state}" for patch in draft.patches)
    applied = all(patch.state in APPLIED for patch in draft.patches)
    draft.say(
        "spec-decode-on-hybrid",
        Effect.NOTED if applied else Effect.WARNED,
        f"vLLM {draft.target} with {draft.wishes.spec} on a hybrid model stores and never serves without the patches "
        f"{states}."
        + (
            ""
            if applied
            else f" Apply them with `kvtier patch apply {' '.join(_FIXES)}` or `kvtier launch --apply-patches`, or "
            "take 0.30."
        ),
    )


def _state(draft: Draft, name: str) -> str:
    """kvpatches judged the vLLM that is installed; of another release nothing is known."""
    if draft.wishes.target_vllm not in (None, draft.facts.versions.vllm):
        return "not-checked"
    return draft.facts.patches.get(name, "not-checked")
