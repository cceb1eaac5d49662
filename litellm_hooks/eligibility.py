"""Which deployments may serve a request: what LiteLLM's router would still take after the hook, worked out before it.

LiteLLM runs the hook after health and cooldown and before context windows, tags, order and weights. A single answer
skips what follows, or fails on it; so the hook applies the same rules first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from litellm_hooks.replica import Deployment, id_of, section

_WEIGHTS = ("weight", "rpm", "tpm")
"""In this order LiteLLM's simple-shuffle looks for a weight; the first that any deployment has decides for all."""


class Eligible(msgspec.Struct):
    """`deployments` in LiteLLM's order with `weights` beside them; `excluded` says why the others are not."""

    deployments: list[Deployment]
    weights: list[float]
    excluded: dict[str, str]


def metadata_of(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The bucket LiteLLM's router writes to: `litellm_metadata` where it is, `metadata` elsewhere."""
    for key in ("litellm_metadata", "metadata"):
        value = request.get(key)
        if isinstance(value, Mapping):
            return value
    return {}


def failed_in(request: Mapping[str, Any]) -> set[str]:
    """Ids of the deployments that this request already failed on, by LiteLLM's own record."""
    failed: set[str] = set()
    previous = metadata_of(request).get("previous_models")
    if isinstance(previous, list | tuple):
        for attempt in previous:
            if not isinstance(attempt, Mapping):
                continue
            info = attempt.get("model_info")
            ident = attempt.get("deployment_id") or (info.get("id") if isinstance(info, Mapping) else None)
            if ident:
                failed.add(str(ident))
    for key in ("_excluded_deployment_ids", "_retry_skipped_deployment_ids"):
        excluded = request.get(key)
        if isinstance(excluded, list | tuple | set | frozenset):
            failed.update(str(ident) for ident in excluded)
    return failed


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def order_of(deployment: Deployment) -> float | None:
    """The deployment's `order` where it has one; lower ones are taken first."""
    for part in ("litellm_params", "model_info"):
        found = _number(section(deployment, part).get("order"))
        if found is not None:
            return found
    return None


def _by_order(deployments: list[Deployment], target: float | None) -> list[Deployment]:
    orders = [order_of(deployment) for deployment in deployments]
    known = [order for order in orders if order is not None]
    if target is None:
        target = min(known) if known else None
    if target is None:
        return deployments
    return [deployment for deployment, order in zip(deployments, orders) if order == target]


def _weights(deployments: Sequence[Deployment], scoped: Mapping[str, Any] | None) -> list[float]:
    if scoped:
        found = [_number(scoped.get(id_of(deployment))) or 0.0 for deployment in deployments]
        if max(found, default=0.0) > 0:
            return found
    for metric in _WEIGHTS:
        found = [_number(section(deployment, "litellm_params").get(metric)) or 0.0 for deployment in deployments]
        if max(found, default=0.0) > 0:
            return found
    return [1.0] * len(deployments)


def _fits(deployment: Deployment, least_tokens: float) -> bool:
    limit = _number(section(deployment, "model_info").get("max_input_tokens"))
    return limit is None or limit <= 0 or least_tokens <= limit


def eligible(
    deployments: Sequence[Deployment],
    request: Mapping[str, Any],
    group: str,
    least_tokens: float,
    failed_names: Iterable[str] = (),
) -> Eligible:
    """The deployments LiteLLM's later steps would leave, tags aside.

    `least_tokens` is a lower estimate of the prompt's tokens: a context window below it cannot hold the prompt.
    `failed_names` are ids the hook itself saw failing in this request. A rule that would leave nothing is skipped.
    """
    excluded: dict[str, str] = {}
    kept = list(deployments)

    def narrow(left: list[Deployment], why: str) -> None:
        nonlocal kept
        if not left or len(left) == len(kept):
            return
        stay = {id(deployment) for deployment in left}
        for deployment in kept:
            if id(deployment) not in stay:
                excluded[id_of(deployment)] = why
        kept = left

    narrow([d for d in kept if section(d, "model_info").get("blocked") is not True], "paused")
    target = _number(request.get("_target_order"))
    if target is not None:
        narrow(_by_order(kept, target), f"order is not {target:g}")
    failed = failed_in(request) | set(failed_names)
    if failed:
        narrow([d for d in kept if id_of(d) not in failed], "failed in this request")
    narrow([d for d in kept if _fits(d, least_tokens)], "context window too small")
    if target is None:
        narrow(_by_order(kept, None), "a lower order is available")
    router_weights = request.get("_router_weights")
    scoped = router_weights.get(group) if isinstance(router_weights, Mapping) else None
    weights = _weights(kept, scoped if isinstance(scoped, Mapping) else None)
    by_id = {id(deployment): weight for deployment, weight in zip(kept, weights)}
    narrow([d for d in kept if by_id[id(d)] > 0], "weight 0")
    return Eligible(kept, [by_id[id(deployment)] or 1.0 for deployment in kept], excluded)
