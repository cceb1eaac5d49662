"""Which streaming requests get a fallback to their own group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from litellm_hooks import stream_failover

STREAM = {"model": "coder", "stream": True}


def fallbacks_after(data: dict[str, Any], router: Any = None) -> Any:
    stream_failover.add(data, router)
    return data.get("fallbacks")


def test_stream_may_go_on_in_its_own_group() -> None:
    """As often as the router retries; in the form that leaves its fallbacks for too long prompts alone."""
    router = SimpleNamespace(fallbacks=None, num_retries=3)
    assert fallbacks_after(dict(STREAM), router) == [{"coder": [{"model": "coder", "num_retries": 3}]}]


@pytest.mark.parametrize("data", [{"model": "coder"}, {"stream": True}, {**STREAM, "disable_fallbacks": True}])
def test_other_requests_are_left_alone(data: dict[str, Any]) -> None:
    """What does not stream is retried by LiteLLM itself."""
    assert fallbacks_after(data) is None


@pytest.mark.parametrize("configured", [[{"coder": ["large"]}], [{"*": ["large"]}], ["large"]])
def test_configured_fallbacks_win(configured: list[Any]) -> None:
    """Neither the operator's fallbacks nor the client's are replaced."""
    assert fallbacks_after(dict(STREAM), SimpleNamespace(fallbacks=configured)) is None
    assert fallbacks_after({**STREAM, "fallbacks": configured}) == configured


@pytest.mark.parametrize(("group", "key"), [("openai/coder", "coder"), ("coder", "openai/coder")])
def test_fallbacks_count_with_and_without_a_providers_name(group: str, key: str) -> None:
    """As LiteLLM looks them up; a group whose name only ends alike is another one."""
    router = SimpleNamespace(fallbacks=[{key: ["large"]}])
    assert fallbacks_after({**STREAM, "model": group}, router) is None
    assert fallbacks_after({**STREAM, "model": f"{group}x"}, router) is not None
    assert fallbacks_after({**STREAM, "model": "my-coder"}, SimpleNamespace(fallbacks=[{"coder": ["large"]}]))


def test_fallbacks_of_the_callers_key_or_team_win() -> None:
    """LiteLLM takes them only where the request has none."""
    override = {"router_settings_override": {"fallbacks": [{"coder": ["large"]}]}}
    assert fallbacks_after({**STREAM, **override}, SimpleNamespace(fallbacks=None)) is None


def test_fallbacks_of_other_groups_stay() -> None:
    """They say nothing about this one, but a request's own fallbacks stand in for all of the configured ones."""
    others = [{"large": ["coder"]}]
    own = {"coder": [{"model": "coder", "num_retries": 1}]}
    assert fallbacks_after(dict(STREAM), SimpleNamespace(fallbacks=others)) == [*others, own]
    override = {"router_settings_override": {"fallbacks": others}}
    assert fallbacks_after({**STREAM, **override}, SimpleNamespace(fallbacks=[{"coder": ["x"]}])) == [*others, own]


def test_retries_that_the_request_names_hold_for_the_second_attempt_too() -> None:
    """None is none."""
    (found,) = fallbacks_after({**STREAM, "num_retries": 0}, SimpleNamespace(fallbacks=None, num_retries=3))
    assert found == {"coder": [{"model": "coder", "num_retries": 0}]}


def test_without_the_proxys_router_there_is_no_fallback() -> None:
    """LiteLLM's plain functions would take it for something else, and a client's own router has its own."""
    assert fallbacks_after(dict(STREAM)) is None
    assert fallbacks_after({**STREAM, "user_config": {"model_list": []}}, SimpleNamespace(fallbacks=None)) is None
