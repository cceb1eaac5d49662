"""Which deployments the hook may choose among."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_hooks.eligibility import eligible


def deployment(name: str, info: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    return {
        "model_name": "m",
        "litellm_params": {"model": "hosted_vllm/x", "api_base": f"http://{name}/v1", **params},
        "model_info": {"id": name, **(info or {})},
    }


def left(deployments: list[dict[str, Any]], request: dict[str, Any] | None = None, tokens: float = 0.0) -> list[str]:
    return [replica.id for _, replica in eligible(deployments, request or {}, "m", tokens).choices]


def test_all_are_eligible_without_a_rule() -> None:
    """Plain deployments are all eligible, at equal weight."""
    found = eligible([deployment("a"), deployment("b")], {}, "m", 0.0)
    assert (found.weights, found.excluded) == ([1.0, 1.0], {})


@pytest.mark.parametrize("bucket", ["metadata", "litellm_metadata"])
def test_what_failed_in_this_request_is_not_eligible(bucket: str) -> None:
    """LiteLLM's record of failed attempts excludes; when everything failed it excludes nothing."""
    request = {bucket: {"previous_models": ({"deployment_id": "a"},)}}
    assert left([deployment("a"), deployment("b")], request) == ["b"]
    assert left([deployment("a")], request) == ["a"]


def test_lowest_order_is_taken_and_a_target_order_obeyed() -> None:
    """Only the lowest order present is eligible, unless LiteLLM's fallback asks for another."""
    pool = [deployment("a", order=1), deployment("b", order=2), deployment("c", order=1), deployment("d")]
    assert left(pool) == ["a", "c"]
    assert left(pool, {"_target_order": 2}) == ["b"]
    assert left(pool, {"metadata": {"previous_models": [{"deployment_id": "a"}, {"deployment_id": "c"}]}}) == ["b"]


def test_weight_zero_is_not_eligible_and_weights_are_kept() -> None:
    """A deployment of weight 0, or of none beside others that have one, gets nothing."""
    found = eligible([deployment("a", weight=0), deployment("b", weight=3), deployment("c")], {}, "m", 0.0)
    assert [replica.id for _, replica in found.choices] == ["b"]
    assert found.weights == [3.0]
    assert found.excluded == {"a": "weight 0", "c": "weight 0"}


def test_weights_of_the_request_come_first() -> None:
    """Weights that LiteLLM scoped to the request override those of the deployments."""
    request = {"_router_weights": {"m": {"a": 1.0}}}
    assert left([deployment("a", weight=0), deployment("b", weight=3)], request) == ["a"]


def test_small_context_window_is_not_eligible() -> None:
    """A window below the least the prompt can be is skipped while another holds it."""
    pool = [
        deployment("a", {"max_input_tokens": 1000}),
        deployment("b", {"max_input_tokens": 100_000}),
        deployment("c"),
    ]
    assert left(pool, tokens=5000) == ["b", "c"]
    assert left(pool[:1], tokens=5000) == ["a"]


def test_paused_deployment_is_not_eligible() -> None:
    """A deployment that is blocked is skipped."""
    assert left([deployment("a", {"blocked": True}), deployment("b")]) == ["b"]


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {"previous_models": "a"}},
        {"metadata": {"previous_models": [None, "a", {"deployment_id": None}]}},
        {"metadata": None, "_target_order": "first"},
        {"_router_weights": [1]},
        {"_excluded_deployment_ids": 7},
    ],
)
def test_odd_requests_leave_all(odd: dict[str, Any]) -> None:
    """Fields of a shape nobody expects exclude nothing."""
    assert left([deployment("a"), deployment("b")], odd) == ["a", "b"]


def test_odd_deployments_are_taken_as_they_are() -> None:
    """Deployments without parameters, or with text for numbers, do not raise."""
    assert left([{}, {"litellm_params": None, "model_info": "x"}]) == ["", ""]
    assert left([deployment("a", order="2", weight="x"), deployment("b", order="1", weight="2")]) == ["b"]
