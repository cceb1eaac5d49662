"""A deployment as the hook sees it: a replica with a name, a server, a weight and a tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from litellm_hooks.settings import KV_TIERS, KvTier

Deployment = Mapping[str, Any]
"""LiteLLM's dict of a deployment: `model_name`, `litellm_params`, `model_info`."""


class Replica(msgspec.Struct, frozen=True):
    """`name` is what prefixes are remembered by and hashed with: the server's address where there is one, because every
    worker and every start of the proxy knows it alike, the deployment's id elsewhere. Two deployments with one address
    are one replica."""

    name: str
    id: str
    tier: KvTier
    lora: str | None


def section(deployment: Deployment, key: str) -> Mapping[str, Any]:
    """`deployment[key]` as a mapping, whatever is there."""
    value = deployment.get(key)
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    plain = dump(exclude_none=True) if callable(dump) else None
    return plain if isinstance(plain, Mapping) else {}


def id_of(deployment: Deployment) -> str:
    return str(section(deployment, "model_info").get("id", ""))


def replica_of(deployment: Deployment) -> Replica:
    """What the hook knows of a deployment. An unknown `kv_tier` counts as none."""
    info = section(deployment, "model_info")
    base = section(deployment, "litellm_params").get("api_base")
    ident = str(info.get("id", ""))
    tier = info.get("kv_tier")
    lora = info.get("lora")
    return Replica(
        name=str(base).rstrip("/") if base else ident,
        id=ident,
        tier=tier if tier in KV_TIERS else "none",
        lora=str(lora) if lora else None,
    )
