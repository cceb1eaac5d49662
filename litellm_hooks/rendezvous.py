"""Weighted rendezvous hashing: an order of replicas for a key that every worker computes alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import xxhash


def rendezvous_order(key: int, weights: Mapping[str, float]) -> list[str]:
    """Names by falling score -weight / ln(u), u uniform in (0, 1) from the hash of key and name.

    Each name comes first for a share of keys equal to its share of the weights, and a name that leaves or joins moves
    only its own keys (Thaler and Ravishankar 1998; weights after Schindelhauer and Schomaker 2005).
    """
    seed = key & 0xFFFFFFFFFFFFFFFF

    def score(name: str) -> float:
        u = (xxhash.xxh3_64_intdigest(name.encode(), seed=seed) + 0.5) / 2.0**64
        return -weights[name] / math.log(u)

    return sorted(weights, key=score, reverse=True)
