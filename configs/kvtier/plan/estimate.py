"""Restore against re-prefill: is the tier worth it, and from which prompt length?"""

from __future__ import annotations

from kvtier.facts import Memory
from kvtier.plan.draft import Draft
from kvtier.plan.result import Estimate

_FIXED_S = 0.05
"""Lookup, scheduling and one step, whatever the length: what a hit costs on top of its bytes."""
_CHUNK_TOKENS = 256
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
    hosts = max(len(draft.nodes), 1)
    per_token = draft.stored_bytes_per_token / hosts
    tokens = draft.context
    prefill = draft.wishes.prefill_tokens_per_s or draft.facts.measured.prefill_tokens_per_s
    pays = None
    if prefill and (gain := 1 / prefill - per_token / rate) > 0:
        pays = -(-int(_FIXED_S / gain + 1) // _CHUNK_TOKENS) * _CHUNK_TOKENS
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


def _rate(draft: Draft, *, disk: bool) -> tuple[float, str]:
    """Bytes a second of the slowest part of the way back to the device."""
    link, link_source = _first(
        (draft.wishes.link_gbps, "given"), (draft.facts.measured.host_to_device, "measured"), (_ASSUMED_LINK, "assumed")
    )
    if not disk:
        return link, f"host to device, {link_source}"
    read, source = _first(
        (draft.wishes.nvme_gbps, "given"), (draft.facts.measured.disk_read, "measured"), (_ASSUMED_DISK, "assumed")
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
