"""Which deployments may serve a request: what LiteLLM's router would still take after the hook, worked out before it.

LiteLLM runs the hook after health and cooldown and before context windows, tags, order and weights. A single answer
skips what follows, or fails on it; so the hook applies the same rules first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from litellm_hooks.replica import Deployment, Replica, number, replica_of

Choice = tuple[Deployment, Replica]


class Eligible(msgspec.Struct):
    """`choices` in LiteLLM's order with `weights` beside them; `excluded` says, by id, why the others are not."""

    choices: list[Choice]
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


def _by_order(choices: list[Choice], target: float | None) -> list[Choice]:
    if target is None:
        known = [replica.order for _, replica in choices if replica.order is not None]
        if not known:
            return choices
        target = min(known)
    return [choice for choice in choices if choice[1].order == target]


def _weights(replicas: Sequence[Replica], scoped: Mapping[str, Any] | None) -> list[float]:
    """As LiteLLM's simple-shuffle: weights of the request, else the first of weight, rpm and tpm that any has."""
    if scoped:
        found = [number(scoped.get(replica.id)) or 0.0 for replica in replicas]
        if max(found, default=0.0) > 0:
            return found
    for found in (
        [replica.weight or 0.0 for replica in replicas],
        [replica.rpm or 0.0 for replica in replicas],
        [replica.tpm or 0.0 for replica in replicas],
    ):
        if max(found, default=0.0) > 0:
            return found
    return [1.0] * len(replicas)


def _fits(replica: Replica, least_tokens: float) -> bool:
    limit = replica.max_input_tokens
    return limit is None or limit <= 0 or least_tokens <= limit


def eligible(
    deployments: Sequence[Deployment],
    request: Mapping[str, Any],
    group: str,
    least_tokens: float,
    failed_ids: Iterable[str] = (),
) -> Eligible:
    """The deployments LiteLLM's later steps would leave, tags aside.

    `least_tokens` is a lower estimate of the prompt's tokens: a context window below it cannot hold the prompt.
    `failed_ids` are deployments the hook saw failing in this request. A rule that would leave nothing is skipped.
    """
    excluded: dict[str, str] = {}
    kept: list[Choice] = [(deployment, replica_of(deployment)) for deployment in deployments]

    def narrow(left: list[Choice], why: str) -> None:
        nonlocal kept
        if not left or len(left) == len(kept):
            return
        stay = {id(deployment) for deployment, _ in left}
        excluded.update((replica.id, why) for deployment, replica in kept if id(deployment) not in stay)
        kept = left

    narrow([choice for choice in kept if not choice[1].blocked], "paused")
    target = number(request.get("_target_order"))
    if target is not None:
        narrow(_by_order(kept, target), f"order is not {target:g}")
    failed = failed_in(request).union(failed_ids)
    if failed:
        narrow([choice for choice in kept if choice[1].id not in failed], "failed in this request")
    narrow([choice for choice in kept if _fits(choice[1], least_tokens)], "context window too small")
    if target is None:
        narrow(_by_order(kept, None), "a lower order is available")
    router_weights = request.get("_router_weights")
    scoped = router_weights.get(group) if isinstance(router_weights, Mapping) else None
    weights = _weights([replica for _, replica in kept], scoped if isinstance(scoped, Mapping) else None)
    weight_of = {id(deployment): weight for (deployment, _), weight in zip(kept, weights)}
    narrow([choice for choice in kept if weight_of[id(choice[0])] > 0], "weight 0")
    return Eligible(kept, [weight_of[id(deployment)] or 1.0 for deployment, _ in kept], excluded)
