"""Restore against re-prefill: is the tier worth it, and from which prompt length?"""

from __future__ import annotations

import math

from kvtier.facts import Memory
from kvtier.plan.draft import Draft
from kvtier.plan.result import Effect, Estimate

_FIXED_S = 0.05
"""Lookup, scheduling and one step, whatever the length: what a hit costs on top of its bytes."""
_CHUNK_TOKENS = 256
ASSUMED = "assumed"
_ASSUMED_LINK = 20e9
"""PCIe 4.0 x16 in practice; a pinned copy measured 13 to 28 GB/s on the boxes of the field reports."""
_ASSUMED_DISK = 3e9
"""A PCIe 4.0 NVMe drive reading from many files."""


def estimates(draft: Draft) -> list[Estimate]:
    """One estimate a tier, for one full-length context. Rates given by the user go before measured, measured before
    assumed."""
    return [_one(draft, tier.name) for tier in draft.tiers if tier.name != "pool" and draft.stored_bytes_per_token]


def _one(draft: Draft, tier: str) -> Estimate:
    rate, source = _rate(draft, disk=tier.startswith("nvme"))
    per_token = _bytes_per_token(draft)
    tokens = draft.context
    prefill = _prefill(draft)
    pays = _pays_from(1 / prefill - per_token / rate, _FIXED_S) if prefill else None
    return Estimate(
        tier=tier,
        rate_bytes_per_s=rate,
        rate_source=source,
        tokens=tokens,
        restore_s=round(_FIXED_S + tokens * per_token / rate, 3),
        prefill_s=round(tokens / prefill, 3) if prefill else None,
        pays_from_tokens=pays,
        break_even_prefill_tokens_per_s=round(rate / per_token, 1),
    )


def _bytes_per_token(draft: Draft) -> float:
    """What one host reads for a token."""
    return draft.stored_bytes_per_token / max(len(draft.serving_nodes), 1)


def _prefill(draft: Draft) -> float | None:
    return draft.wishes.prefill_tokens_per_s or draft.facts.measured.prefill_tokens_per_s


def _pays_from(gain: float, fixed_s: float) -> int | None:
    """The shortest prefix, in whole chunks, that is loaded sooner than computed: `gain` seconds a token against what a
    load costs whatever its length. None where loading never gains."""
    return math.ceil((int(fixed_s / gain) + 1) / _CHUNK_TOKENS) * _CHUNK_TOKENS if gain > 0 else None


def min_retrieve_tokens(draft: Draft) -> int:
    """LMCache's `min_retrieve_tokens` for the NVMe tier: hits below it are computed. 0 where every hit pays, or where
    the rates that would tell are not known: an assumed one decides nothing."""
    rates = draft.wishes.engine_rates
    if rates is not None:
        pays, source = rates.tokens, f"{rates.source}, measured in an engine"
    else:
        rate, rate_source = _rate(draft, disk=True)
        prefill = _prefill(draft)
        if prefill is None or not draft.stored_bytes_per_token or ASSUMED in rate_source:
            return 0
        pays = _pays_from(1 / prefill - _bytes_per_token(draft) / rate, _FIXED_S)
        source = f"prefill {prefill:,.0f} tokens/s, {rate / 1e9:.1f} GB/s ({rate_source})"
    if pays is None or pays >= draft.context:
        draft.say(
            "tier-slower-than-prefill",
            Effect.WARNED,
            f"no prefix that fits the context comes sooner from NVMe than by prefill ({source}): this tier only "
            "costs here. A faster drive, or none.",
        )
        return 0
    if pays <= _CHUNK_TOKENS:
        return 0
    draft.say(
        "short-hits-are-computed",
        Effect.CHANGED,
        f"min_retrieve_tokens: {pays}: a shorter hit is computed sooner than loaded ({source}).",
    )
    return pays


def _rate(draft: Draft, *, disk: bool) -> tuple[float, str]:
    """Bytes a second of the slowest part of the way back to the device."""
    link, link_source = _first(
        (draft.wishes.link_gbps, "given"), (draft.facts.measured.host_to_device, "measured"), (_ASSUMED_LINK, ASSUMED)
    )
    if not disk:
        return link, f"host to device, {link_source}"
    read, source = _first(
        (draft.wishes.nvme_gbps, "given"), (draft.facts.measured.disk_read, "measured"), (_ASSUMED_DISK, ASSUMED)
    )
    if draft.memory is Memory.DISCRETE and link < read:
        return link, f"host to device, {link_source} (slower than the disk)"
    return read, f"NVMe read, {source}"


def _first(
    given: tuple[float | None, str], measured: tuple[float | None, str], assumed: tuple[float, str]
) -> tuple[float, str]:
    if given[0]:
        return given[0] * 1e9, given[1]
    return (measured[0], measured[1]) if measured[0] else assumed
