"""Where the hook meets LiteLLM's own rules and forms: its router, tags, context windows, usage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from litellm_hooks.usage import usage_of
from tests.unit.hooks.driver import Proxy, deployments, run, session


def test_router_without_proxy_keeps_sessions() -> None:
    """litellm.Router alone gives the filter no call id: the trace id stands in, also where calls share it."""

    async def work(proxy: Proxy) -> None:
        hook = proxy.hook
        homes = []
        for turns in (1, 3, 5):
            request = {"litellm_trace_id": "trace", "metadata": {}}
            (found,) = await hook.async_filter_deployments("m", proxy.pool, session(1, turns), request)
            homes.append(found["model_info"]["id"])
            kwargs = {
                "litellm_call_id": f"later-{turns}",
                "litellm_trace_id": "trace",
                "model_info": found["model_info"],
            }
            await hook.async_pre_call_deployment_hook(kwargs, "acompletion")
            assert len(hook.affinity.ledger) == 1
            assert len(hook.affinity.calls.get("trace").prefix.keys) >= turns
            await hook.async_post_call_success_deployment_hook(kwargs, {}, "acompletion")
            assert len(hook.affinity.ledger) == 0
            assert hook.affinity.calls.get("trace").reason == ("rendezvous" if turns == 1 else "prefix")
        assert len(set(homes)) == 1

    run(work)


def test_tags_are_obeyed_before_affinity() -> None:
    """A session whose prefix lies at a replica without the request's tag goes to one that has it."""
    from litellm import Router

    pool = [*deployments("a", tags=["free"]), *deployments("b", tags=["paid"]), *deployments("c", tags=["paid"])]

    async def work(proxy: Proxy) -> None:
        proxy.hook._router = Router(model_list=pool, enable_tag_filtering=True)
        for n in range(8):
            assert await proxy.ask(session(n, 1), metadata={"tags": ["free"]}) == "a"
            paid = await proxy.ask(session(n, 3), metadata={"tags": ["paid"]})
            assert paid in ("b", "c")
            assert await proxy.ask(session(n, 5), metadata={"tags": ["paid"]}) == paid
        assert len(await proxy.pick(session(0, 5), metadata={"tags": ["gold"]})) == 3

    run(work, pool=pool)


def test_litellm_whose_tag_rules_look_different_keeps_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM 1.110 takes other arguments there: untagged groups are placed, tagged ones left to LiteLLM."""
    from litellm.router_strategy import tag_based_routing

    async def newer(ctx: Any, *, request_deployments: Any) -> Any:
        raise AssertionError("not reached")

    monkeypatch.setattr(tag_based_routing, "get_deployments_for_tag", newer)

    async def work(proxy: Proxy) -> None:
        proxy.hook._router = SimpleNamespace(enable_tag_filtering=True)
        assert len(await proxy.pick(session(1, 1))) == 1
        proxy.pool[0]["litellm_params"]["tags"] = ["paid"]
        assert len(await proxy.pick(session(1, 1))) == 3
        proxy.hook._router = SimpleNamespace(enable_tag_filtering=False)
        assert len(await proxy.pick(session(1, 1))) == 1

    run(work)


def test_context_window_is_obeyed_before_affinity() -> None:
    """With pre-call checks on, a session that outgrew its replica's window goes where it fits."""
    from litellm import Router

    pool = deployments("a", "b")
    pool[0]["model_info"]["max_input_tokens"] = 4000
    pool[1]["model_info"]["max_input_tokens"] = 100_000

    async def work(proxy: Proxy) -> None:
        proxy.hook._router = Router(model_list=pool, enable_pre_call_checks=True)
        homes = [await proxy.ask(session(n, 1, 6000)) for n in range(12)]
        assert set(homes) == {"a", "b"}
        for n in range(12):
            assert await proxy.ask(session(n, 9, 6000)) == "b"

    run(work, pool=pool)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
        {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
        SimpleNamespace(prompt_tokens=9, prompt_tokens_details=SimpleNamespace(cached_tokens=4)),
    ],
)
def test_usage_is_read_in_every_form(usage: Any) -> None:
    """Objects and mappings, chat's and Responses' names."""
    found = usage_of(SimpleNamespace(usage=usage))
    assert found is not None
    assert (found.prompt_tokens, found.cached) == (9, 4)
