"""LiteLLM's side of the hook, called as LiteLLM's router calls it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from litellm_hooks.settings import Settings
from tests.unit.hooks.driver import Proxy, run, session

ROOT = Path(__file__).resolve().parents[3]


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


def test_call_id_that_comes_again_is_another_request() -> None:
    """A client may choose it: neither the prefix of an earlier request under it counts, nor what failed then."""

    async def work(proxy: Proxy) -> None:
        homes = {n: await proxy.ask(session(n, 1), call_id="mine") for n in range(12)}
        assert len(set(homes.values())) == 3
        (home,) = await proxy.pick(session(0, 3), "mine")
        await proxy.fail("mine", home, "engine died")
        assert await proxy.ask(session(0, 3), call_id="mine") != home
        for n in range(1, 12):
            assert await proxy.ask(session(n, 3), call_id="mine") == homes[n]

    run(work)


def test_headers_are_not_sent_unless_asked_for() -> None:
    """By default an answer says nothing of where it came from."""

    async def headers(proxy: Proxy) -> Any:
        await proxy.ask(session(1, 1), call_id="x")
        return await proxy.hook.async_post_call_response_headers_hook({"litellm_call_id": "x"}, None, None)

    assert run(headers) is None
    assert run(headers, Settings(share_by_redis=False, response_headers=True))["x-kv-reason"] == "rendezvous"


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


def test_decision_log_holds_no_prompt_text(tmp_path: Path) -> None:
    """A decision and its answer are logged with reason, replica and tokens, without a word of the prompt."""
    path = tmp_path / "log" / "decisions.jsonl"

    async def work(proxy: Proxy) -> None:
        await proxy.ask(session(1, 1), cached=7)

    run(work, Settings(share_by_redis=False, decision_log=str(path)))
    decision, answer = [json.loads(line) for line in path.read_text().splitlines()]
    assert (decision["event"], decision["reason"], answer["cached_tokens"]) == ("decision", "rendezvous", 7)
    assert "session 1" not in path.read_text()


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
