"""LiteLLM's side of the hook, called as LiteLLM's router calls it."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("litellm", reason="LiteLLM is not installed")

from litellm_hooks.hook import PrefixAffinity
from litellm_hooks.settings import Settings
from litellm_hooks.usage import usage_of

ROOT = Path(__file__).resolve().parents[3]


def deployments(*names: str, **params: Any) -> list[dict[str, Any]]:
    return [
        {
            "model_name": "m",
            "litellm_params": {"model": "hosted_vllm/x", "api_base": f"http://{name}/v1", **params},
            "model_info": {"id": name},
        }
        for name in names
    ]


def session(number: int, turns: int, chars: int = 4000) -> list[dict[str, Any]]:
    text = f"session {number} " + "text " * (chars // 5)
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i} {text}"} for i in range(turns)]


class Proxy:
    """Drives the hooks of one request in the order LiteLLM does."""

    def __init__(self, hook: PrefixAffinity, pool: list[dict[str, Any]]) -> None:
        self.hook, self.pool, self.calls = hook, pool, 0

    async def pick(self, messages: Any, call_id: str | None = None, **request: Any) -> list[str]:
        self.calls += 1
        request = {"litellm_call_id": call_id or f"call-{self.calls}", "metadata": {}, **request}
        answer = await self.hook.async_filter_deployments("m", self.pool, messages, request)
        return [found["model_info"]["id"] for found in answer]

    async def ask(self, messages: Any, cached: int | None = None, call_id: str | None = None, **request: Any) -> str:
        self.calls += 1
        call_id = call_id or f"call-{self.calls}"
        (name,) = await self.pick(messages, call_id, **request)
        kwargs = {
            "litellm_call_id": call_id,
            "model": "hosted_vllm/x",
            "api_base": "http://x",
            "model_info": {"id": name},
        }
        await self.hook.async_pre_call_deployment_hook(kwargs, "acompletion")
        await self.hook.async_post_call_success_deployment_hook(kwargs, {}, "acompletion")
        size = sum(len(message["content"]) for message in messages) // 4
        usage = {"prompt_tokens": size, "prompt_tokens_details": None if cached is None else {"cached_tokens": cached}}
        logged = {
            "litellm_call_id": call_id,
            "litellm_params": {"model_info": {"id": name}},
            "call_type": "acompletion",
        }
        await self.hook.async_log_success_event(logged, {"usage": usage}, 0, 0)
        return name

    async def fail(self, call_id: str, name: str, error: str) -> None:
        kwargs = {
            "litellm_call_id": call_id,
            "model": "hosted_vllm/x",
            "api_base": "http://x",
            "model_info": {"id": name},
        }
        await self.hook.async_pre_call_deployment_hook(kwargs, "acompletion")
        await self.hook.async_post_call_failure_deployment_hook(kwargs, RuntimeError(error), "acompletion")


def run(work: Any, settings: Settings | None = None, pool: list[dict[str, Any]] | None = None) -> Any:
    async def inner() -> Any:
        hook = PrefixAffinity(settings or Settings(share_by_redis=False))
        try:
            return await work(Proxy(hook, pool or deployments("a", "b", "c")))
        finally:
            await hook.close()

    return asyncio.run(inner())


def test_turns_of_one_session_stay() -> None:
    """Every turn goes where the first went, for each of many sessions, and all replicas are used."""

    async def work(proxy: Proxy) -> None:
        homes = {n: await proxy.ask(session(n, 1)) for n in range(30)}
        assert len(set(homes.values())) == 3
        for turns in (3, 5, 7):
            for n in range(30):
                assert await proxy.ask(session(n, turns)) == homes[n]

    run(work)


@pytest.mark.parametrize("messages", [None, [], "", 7, {}, [None], [{"role": "user", "content": None}]])
def test_filter_never_raises_and_never_returns_nothing(messages: Any) -> None:
    """Whatever comes as messages, the answer is one or more of what was offered."""

    async def work(proxy: Proxy) -> None:
        assert await proxy.pick(messages)
        assert await proxy.hook.async_filter_deployments("m", proxy.pool, messages) != []
        assert await proxy.hook.async_filter_deployments("m", proxy.pool, messages, {"input": messages, "metadata": 3})

    run(work)


def test_failure_inside_the_hook_leaves_the_choice_to_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the decision costs the decision: all deployments come back, and the request goes on."""

    async def work(proxy: Proxy) -> None:
        monkeypatch.setattr(proxy.hook.affinity, "decide", lambda *_: 1 / 0)
        assert await proxy.pick(session(1, 1)) == ["a", "b", "c"]

    run(work)


def test_no_messages_leave_the_choice_to_litellm() -> None:
    """count_tokens and the like show nothing to go by: all eligible deployments come back."""

    async def work(proxy: Proxy) -> None:
        assert await proxy.pick(None) == ["a", "b", "c"]
        assert len(proxy.hook.affinity.ledger) == 0

    run(work)


def test_failed_replica_is_left_at_once_and_the_session_stays_at_the_new_one() -> None:
    """The retry of a request goes elsewhere, and so does the session from then on."""

    async def work(proxy: Proxy) -> None:
        home = await proxy.ask(session(1, 1))
        (again,) = await proxy.pick(session(1, 3), "x")
        assert again == home
        await proxy.fail("x", home, "Connection error.")
        assert await proxy.ask(session(1, 3), call_id="x") != home
        new = await proxy.ask(session(1, 5))
        assert new != home

    run(work)


@pytest.mark.parametrize(("tier", "stays"), [("nvme", True), ("ram", False), (None, False)])
def test_restarted_replica_keeps_its_sessions_only_with_an_nvme_tier(tier: str | None, stays: bool) -> None:
    """A replica that was gone is forgotten unless its tier survives the restart."""

    async def work(proxy: Proxy) -> None:
        for found in proxy.pool:
            found["model_info"]["kv_tier"] = tier
        sessions = [session(n, 1) for n in range(20)]
        homes = [await proxy.ask(messages, call_id=f"s{n}") for n, messages in enumerate(sessions)]
        gone = homes[0]
        await proxy.pick(session(99, 1), "x")
        await proxy.fail("x", gone, "Connection error.")
        affinity = proxy.hook.affinity
        held = [
            affinity.table.longest(affinity.calls.get(f"s{n}").prefix, [f"http://{gone}/v1"])
            for n in range(20)
            if homes[n] == gone
        ]
        assert all(bool(claim) is stays for claim in held)

    run(work)


def test_predicted_hits_measured_as_none_are_forgotten() -> None:
    """Two answers in a row without a cached token end the claim, at a replica that does report cached tokens."""

    async def work(proxy: Proxy) -> None:
        home = await proxy.ask(session(1, 1, 40_000), cached=64)
        name = f"http://{home}/v1"
        for turns, held in ((3, True), (5, False)):
            await proxy.ask(session(1, turns, 40_000), cached=0)
            prefix = proxy.hook.affinity.calls.get(f"call-{proxy.calls - 1}").prefix
            assert bool(proxy.hook.affinity.table.longest(prefix, [name])) is held

    run(work)


def test_replica_that_never_reports_cached_tokens_is_believed_to_cache() -> None:
    """Without --enable-prompt-tokens-details an answer's zero says nothing."""

    async def work(proxy: Proxy) -> None:
        home = await proxy.ask(session(1, 1, 40_000), cached=0)
        for turns in (3, 5, 7, 9):
            assert await proxy.ask(session(1, turns, 40_000), cached=0) == home

    run(work)


def test_load_is_given_back_on_every_path() -> None:
    """After success, failure, an aborted stream and a call that never left, nothing counts as load any more."""

    async def work(proxy: Proxy) -> None:
        hook = proxy.hook
        await proxy.ask(session(1, 1))
        (name,) = await proxy.pick(session(2, 1), "failing")
        await proxy.fail("failing", name, "engine died")
        for call_id, chunks_read in (("read", None), ("aborted", 1)):
            (name,) = await proxy.pick(session(3, 1), call_id)
            await hook.async_pre_call_deployment_hook({"litellm_call_id": call_id, "model_info": {"id": name}}, "x")
            assert len(hook.affinity.ledger) == 1

            async def stream() -> Any:
                for chunk in range(5):
                    yield chunk

            relay = hook.async_post_call_streaming_iterator_hook(None, stream(), {"litellm_call_id": call_id})
            if chunks_read is None:
                assert [chunk async for chunk in relay] == [0, 1, 2, 3, 4]
            else:
                await anext(relay)
                await relay.aclose()
            assert len(hook.affinity.ledger) == 0
        await proxy.pick(session(4, 1), "never-left")
        assert len(hook.affinity.ledger) == 1
        hook.affinity.clock = lambda: time.monotonic() + 3.0
        hook.affinity.publish()
        assert len(hook.affinity.ledger) == 0

    run(work)


def test_stream_that_took_anothers_place_is_closed_when_the_client_goes() -> None:
    """LiteLLM knows the first stream alone: without this the replica would go on to generate."""

    class Stream:
        def __init__(self, *chunks: object) -> None:
            self.left, self.closed = list(chunks), False

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> object:
            if isinstance(chunk := self.left.pop(0), Exception):
                raise chunk
            return chunk

        async def aclose(self) -> None:
            self.closed = True

    second = Stream(0, 1, 2)

    class Wrapper:
        """As LiteLLM's for text completions: it cannot be closed itself."""

        completion_stream = second

        def __aiter__(self) -> Stream:
            return second

    async def again(**request: Any) -> Any:
        return Wrapper()

    async def work(proxy: Proxy) -> None:
        proxy.hook._router = SimpleNamespace(num_retries=1, atext_completion=again)
        request = {"litellm_call_id": "x", "prompt": "p", "fallbacks": [{"m": ["m"]}]}
        relay = proxy.hook.async_post_call_streaming_iterator_hook(None, Stream(OSError("gone")), request)
        assert await anext(relay) == 0
        assert not second.closed
        await relay.aclose()
        assert second.closed

    run(work)


def test_bridged_call_is_one_lease() -> None:
    """/v1/messages runs the deployment hook twice with one call id: it counts once."""

    async def work(proxy: Proxy) -> None:
        (name,) = await proxy.pick(session(1, 1), "x")
        for call_type in ("anthropic_messages", "acompletion"):
            await proxy.hook.async_pre_call_deployment_hook(
                {"litellm_call_id": "x", "model_info": {"id": name}}, call_type
            )
        assert proxy.hook.affinity.ledger.load(f"http://{name}/v1").running == 1

    run(work)


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


def test_decision_log_holds_no_prompt_text(tmp_path: Path) -> None:
    """A decision and its answer are logged with reason, replica and tokens, without a word of the prompt."""
    path = tmp_path / "log" / "decisions.jsonl"

    async def work(proxy: Proxy) -> None:
        await proxy.ask(session(1, 1), cached=7)

    run(work, Settings(share_by_redis=False, decision_log=str(path)))
    decision, answer = [json.loads(line) for line in path.read_text().splitlines()]
    assert (decision["event"], decision["reason"], answer["cached_tokens"]) == ("decision", "rendezvous", 7)
    assert "session 1" not in path.read_text()


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


def test_package_imports_neither_torch_nor_the_other_packages() -> None:
    """Importing the hook brings in no torch, no vLLM, no LMCache and none of the project's other packages."""
    code = (
        "import sys, litellm_hooks; assert 'litellm' not in sys.modules; import litellm_hooks.hook; "
        "bad = {'torch', 'vllm', 'lmcache', 'lmcache_nvme_backend', 'kvtier', 'kvpatches'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_decision_takes_a_fraction_of_reading_the_request() -> None:
    """The filter costs at most three times what parsing 100 KB of history as JSON costs (some 0.1 ms)."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "some words of a history, 42\n" * 60}
        for i in range(60)
    ]
    text = json.dumps(messages)

    async def work(proxy: Proxy) -> float:
        times, reads = [], []
        for number in range(200):
            began = time.perf_counter()
            turns = json.loads(text)
            reads.append(time.perf_counter() - began)
            began = time.perf_counter()
            await proxy.pick(turns, f"timed-{number}")
            times.append(time.perf_counter() - began)
        return statistics.median(times) / statistics.median(reads)

    assert run(work) < 3.0
