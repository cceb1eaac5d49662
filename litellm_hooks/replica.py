"""A deployment as the hook sees it: a replica with a name, a server, a weight and a tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from litellm_hooks.settings import KV_TIERS, KvTier

Deployment = Mapping[str, Any]
"""LiteLLM's dict of a deployment: `model_name`, `litellm_params`, `model_info`."""


class Replica(msgspec.Struct, frozen=True):
    """What the hook knows of a deployment.

    `name` is what prefixes are remembered by and hashed with: the server's address where there is one, because every
    worker and every start of the proxy knows it alike, the deployment's id elsewhere. Two deployments with one address
    are one replica. Fields that are None were not set.
    """

    name: str
    id: str
    tier: KvTier = "none"
    lora: str | None = None
    order: float | None = None
    weight: float | None = None
    rpm: float | None = None
    tpm: float | None = None
    max_input_tokens: float | None = None
    blocked: bool = False
    tier_found: object = None
    """`kv_tier` as it stands in the configuration, for a word about a wrong one."""


_NOTHING: Mapping[str, Any] = {}


def section(deployment: Deployment, key: str) -> Mapping[str, Any]:
    """`deployment[key]` as a mapping, whatever is there."""
    value = deployment.get(key)
    if type(value) is dict:
        return value
    if isinstance(value, Mapping):
        return value
    dump = getattr(value, "model_dump", None)
    plain = dump(exclude_none=True) if callable(dump) else None
    return plain if isinstance(plain, Mapping) else _NOTHING


def number(value: object) -> float | None:
    """A number, also one written as text; None for anything else."""
    if value is None or value is True or value is False:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def id_of(deployment: Deployment) -> str:
    return str(section(deployment, "model_info").get("id", ""))


def replica_of(deployment: Deployment) -> Replica:
    """Reads a deployment. An unknown `kv_tier` counts as none."""
    info, params = section(deployment, "model_info"), section(deployment, "litellm_params")
    base = params.get("api_base")
    ident = str(info.get("id", ""))
    tier, lora = info.get("kv_tier"), info.get("lora")
    order = number(params.get("order"))
    return Replica(
        str(base).rstrip("/") if base else ident,
        ident,
        tier if tier in KV_TIERS else "none",
        str(lora) if lora else None,
        number(info.get("order")) if order is None else order,
        number(params.get("weight")),
        number(params.get("rpm")),
        number(params.get("tpm")),
        number(info.get("max_input_tokens")),
        info.get("blocked") is True,
        tier,
    )
