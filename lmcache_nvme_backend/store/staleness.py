"""Which parts of a cache directory nobody will ask for again, as far as can be told."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_nvme_backend.store.survey import DAY_S, Part


def mark_stale(parts: Sequence[Part], unused_s: float, now_ns: int) -> None:
    """Give a reason to each part that is stale: one that nobody has open and that is

    - unused for longer than `unused_s` seconds, or
    - of weights that have been replaced: another part has the same model name, other weights, and was used later.
    """
    for part in parts:
        if part.open_by:
            continue
        idle_s = (now_ns - (part.used_ns or 0)) / 1e9
        successor = _successor(part, parts)
        if successor is not None:
            part.stale = f"other weights have been used at {part.model_name} since: {successor.name}"
        elif part.used_ns is None:
            part.stale = "it holds no chunk"
        elif idle_s > unused_s:
            part.stale = f"unused for {idle_s / DAY_S:.1f} days"


def _successor(part: Part, parts: Sequence[Part]) -> Part | None:
    weights = _weights(part)
    if weights is None or part.model_name is None:
        return None
    later = [
        other
        for other in parts
        if other.model_name == part.model_name
        and _weights(other) not in (None, weights)
        and (other.open_by or (other.used_ns or 0) > (part.used_ns or 0))
    ]
    return max(later, key=lambda other: (bool(other.open_by), other.used_ns or 0), default=None)


def _weights(part: Part) -> str | None:
    found = (part.facts or {}).get("model")
    return found if isinstance(found, str) else None
