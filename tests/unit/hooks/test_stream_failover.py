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


def test_fallbacks_of_other_groups_do_not_count() -> None:
    """They say nothing about this one."""
    assert fallbacks_after(dict(STREAM), SimpleNamespace(fallbacks=[{"large": ["coder"]}])) is not None
