"""One proxy worker in front of two and four replicas: who gets what, in every format, whatever happens."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .conftest import KEY, ModelServer, Proxy, example, model_servers, running_proxy, session, wait_for
from .formats import chat, claude_code, completions, messages, responses

# Three turns of one session, as it sent them; every word is replaced, every text cut.
CLAUDE_CODE = Path(__file__).with_name("fixtures") / "claude-code-2.1.332.json"


class Rig:
    """A proxy with both groups of the example: `coder` at two replicas, `large` at four."""

    def __init__(self, proxy: Proxy, coder: list[ModelServer], large: list[ModelServer], log: Path) -> None:
        self.proxy, self.coder, self.large, self.log = proxy, coder, large, log
        self.openai = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=KEY, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=proxy.url, api_key=KEY, max_retries=0)

    def metrics(self) -> dict[str, float]:
        text = self.proxy.client.get("/metrics/").text
        return {
            name: float(value)
            for name, value in re.findall(r"^(litellm_prefix_affinity\S*(?:\{[^}]*\})?) (\S+)$", text, re.M)
        }

    def in_flight(self) -> float:
        return sum(value for name, value in self.metrics().items() if "_in_flight{" in name)

    def paths(self, marker: str) -> dict[str, list[str]]:
        """For each coder replica, the paths of the requests whose body holds `marker`."""
        return {
            server.name: [r["path"] for r in server.requests() if marker in json.dumps(r["body"])]
            for server in self.coder
        }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("one-worker")
    with ExitStack() as stack:
        coder = stack.enter_context(
            model_servers(folder, ["c1", "c2"], "--decode-ms", "5", "--tier", "{folder}/{name}.tier")
        )
        large = stack.enter_context(model_servers(folder, ["l1", "l2", "l3", "l4"]))
        log = folder / "decisions.jsonl"
        settings: dict[str, Any] = {"decision_log": str(log), "poll_metrics_s": 0.5}
        config = example("coder", coder, **settings)
        config["model_list"] += example("large", large)["model_list"]
        config["litellm_settings"]["callbacks"].append("prometheus")
        config["litellm_settings"]["require_auth_for_metrics_endpoint"] = False
        yield Rig(stack.enter_context(running_proxy(folder, config)), coder, large, log)


def test_turns_stay_and_hit_the_cache(rig: Rig) -> None:
    """Every turn of a session goes to the replica of its first, is answered from its cache, and says so in headers."""
    homes = {}
    for turns in (1, 3, 5):
        for number in range(8):
            answer = rig.proxy.ask(session(number, turns))
            assert answer.status_code == 200
            home = answer.headers["x-kv-replica"]
            assert homes.setdefault(number, home) == home
            assert answer.headers["x-kv-reason"] == ("rendezvous" if turns == 1 else "prefix")
            if turns > 1:
                usage = answer.json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 0.4 * usage["prompt_tokens"]
    assert set(homes.values()) == {"coder-1", "coder-2"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", [chat, completions, responses, messages])
def test_every_endpoint_has_affinity(rig: Rig, endpoint: Any, stream: bool) -> None:
    """Requests built by the official clients, streaming or not, stay with their session on every endpoint."""
    for number in range(2):
        marker = f"{endpoint.__name__}-{stream}-{number}"
        for turns in (1, 3, 5):
            endpoint(rig, marker, turns, stream)
        counts = sorted(len(paths) for paths in rig.paths(f"session {marker} ").values())
        assert counts == [0, 3]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_previous_response_goes_back_to_its_replica(rig: Rig, stream: bool) -> None:
    """/v1/responses goes on at the replica that stored the response named by previous_response_id."""

    def respond(text: str, **more: Any) -> str:
        answer: Any = rig.openai.responses.create(model="coder", input=text, stream=stream, **more)
        last = list(answer)[-1].response if stream else answer
        return str(last.id)

    homes = set()
    for number in range(8):
        marker = f"previous-{stream}-{number}"
        first = respond(f"session {marker} begins")
        respond(f"session {marker} goes on", previous_response_id=first)
        (home,) = [name for name, paths in rig.paths(f"session {marker} ").items() if paths]
        assert len(rig.paths(f"session {marker} ")[home]) == 2
        homes.add(home)
    assert len(homes) == 2


def test_count_tokens_is_answered(rig: Rig) -> None:
    """Counting tokens runs the filter with nothing to go by and no call after it: no error, no load left."""
    counted = rig.anthropic.messages.count_tokens(model="coder", messages=[{"role": "user", "content": "hello " * 50}])
    assert counted.input_tokens > 0
    wait_for(lambda: rig.in_flight() == 0, seconds=10)


def test_claude_code_session_stays(rig: Rig) -> None:
    """Claude Code's turns stay together although a line of their system prompt changes every time."""
    for number in range(2):
        marker = f"claude-{number}"
        for turns in range(4):
            rig.anthropic.messages.create(**claude_code(turns, f"{number}{turns}f", marker))
        assert sorted(len(paths) for paths in rig.paths(f"session {marker} ").values()) == [0, 4]


def test_turns_of_claude_code_stay(rig: Rig) -> None:
    """Three turns that Claude Code 2.1.332 sent (its words replaced): their first one's replica answers all of them
    from its cache, although the client moves its `cache_control` marks and writes earlier messages in another form."""
    turns = json.loads(CLAUDE_CODE.read_text())
    answers = []
    for turn in turns:
        answer = rig.proxy.client.post("/v1/messages", json={**turn, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        answers.append((answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]))
    home = answers[0][0]
    assert answers == [(home, "rendezvous"), (home, "prefix"), (home, "prefix")]


def test_aborted_streams_do_not_leak_load(rig: Rig) -> None:
    """A client that goes away in mid-stream leaves no load behind, on any endpoint."""
    text = "tell me a long story"
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": [{"role": "user", "content": text}]},
    }
    for path, body in bodies.items():
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        for _ in range(3):
            whole = {"model": "coder", "stream": True, limit: 300, **body}
            with rig.proxy.client.stream("POST", path, json=whole) as answer:
                assert answer.status_code == 200
                next(answer.iter_bytes())
    wait_for(lambda: rig.in_flight() == 0, seconds=15)


def test_request_reaches_the_replica_as_the_client_sent_it(rig: Rig) -> None:
    """Not told to remove anything, the hook changes no message, tool or parameter, nor their order."""
    turns = [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou are an agent, verbatim."},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "blocks"}]},
        {"role": "assistant", "content": "I call it.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "gf"]
    body = {"tools": tools, "temperature": 0.5, "cache_salt": "mine", "reasoning_effort": "low"}
    assert rig.proxy.ask(turns, **body).status_code == 200
    (sent,) = [r["body"] for s in rig.coder for r in s.requests() if "verbatim" in json.dumps(r["body"])]
    assert json.dumps(sent["messages"]) == json.dumps(turns)
    assert {name: sent[name] for name in body} == body


DEEP: dict[str, Any] = {"name": "f", "parameters": {}}
for _ in range(100):
    DEEP["parameters"] = {"type": "object", "properties": {"p": DEEP["parameters"]}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": None}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram", "beam": 1}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        {"messages": [{"role": "user", "content": "x" * 10_000_000}]},
        {"messages": [{"role": "user", "content": "\ud83d half"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": DEEP}]},
    ],
    ids=["none", "role", "part", "kind", "10 MB", "surrogate", "tools"],
)  # fmt: skip
def test_malformed_requests_are_routed_as_without_the_hook(rig: Rig, body: dict[str, Any]) -> None:
    """What a client may get wrong never fails in the hook: its error counters stand still."""
    before = {name: value for name, value in rig.metrics().items() if "_errors_total" in name}
    answer = rig.proxy.client.post(
        "/v1/chat/completions",
        content=json.dumps({"model": "coder", **body}),
        headers={"content-type": "application/json"},
    )
    litellm_refuses = answer.status_code in (400, 422) or "Invalid user message" in answer.text
    assert answer.status_code == 200 or litellm_refuses, answer.text[:300]
    assert {name: value for name, value in rig.metrics().items() if "_errors_total" in name} == before


def test_ten_megabytes_are_placed_in_a_moment(rig: Rig) -> None:
    """The decision for the longest prompt takes a small part of a second, on a busy machine too."""
    assert rig.proxy.ask([{"role": "user", "content": "ten megabytes " * 700_000}]).status_code == 200

    def decision() -> Any:
        lines = [json.loads(line) for line in rig.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == "decision" and line["prompt_tokens"] > 1_000_000]

    assert min(line["took_us"] for line in wait_for(decision, seconds=10)) < 50_000


def test_metrics_tell_what_happened(rig: Rig) -> None:
    """Decisions by reason, hit tokens predicted and measured, table size and decision time are on /metrics."""
    before = rig.metrics()
    rig.proxy.ask(session("metered", 1))
    rig.proxy.ask(session("metered", 3))

    def grown() -> bool:
        after = rig.metrics()

        def growth(name: str) -> float:
            return after.get(f"litellm_prefix_affinity_{name}", 0) - before.get(f"litellm_prefix_affinity_{name}", 0)

        return (
            growth('decisions_total{reason="rendezvous"}') == 1
            and growth('decisions_total{reason="prefix"}') == 1
            and growth("predicted_hit_tokens_total") > 500
            and growth("measured_hit_tokens_total") > 500
            and growth("decision_seconds_count") == 2
            and after["litellm_prefix_affinity_table_entries"] > 0
        )

    wait_for(grown, seconds=10)


def test_decision_log_is_written_without_prompt_text(rig: Rig) -> None:
    """Each decision and answer is a line of JSON; no line holds any of the prompt."""
    rig.proxy.ask(session("logged-secret-word", 1))

    def events() -> Any:
        lines = [json.loads(line) for line in rig.log.read_text().splitlines()]
        return lines if {line["event"] for line in lines} >= {"decision", "answer"} else None

    for line in wait_for(events, seconds=10):
        assert line["worker"] > 0
    assert "logged-secret-word" not in rig.log.read_text()


def test_order_and_weight_are_obeyed(rig: Rig) -> None:
    """Of four replicas the one of order 2 gets nothing, and the one of weight 2 about half of the sessions."""
    counts: Counter[str] = Counter()
    for number in range(120):  # addresses are drawn anew in every run, and with them the places
        counts[rig.proxy.ask(session(f"order {number}", 1, chars=200), model="large").headers["x-kv-replica"]] += 1
    assert set(counts) == {"large-1", "large-2", "large-3"}
    assert counts["large-1"] > max(counts["large-2"], counts["large-3"])


def test_killed_replica_costs_no_client_error(rig: Rig) -> None:
    """A replica dies by SIGKILL under load: no request fails, its sessions go on elsewhere, and come back for use."""
    victim = rig.coder[0]
    failures: list[str] = []
    served: Counter[str] = Counter()
    stop = threading.Event()

    def user(number: int) -> None:
        with httpx.Client(base_url=rig.proxy.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            turns = 1
            while not stop.is_set():
                body = {
                    "model": "coder",
                    "messages": session(f"kill {number}", turns, chars=400),
                    "stream": number % 2 == 0,
                }
                answer = client.post("/v1/chat/completions", json=body)
                # Nobody, LiteLLM included, can go on with a stream whose replica died after the first word.
                begun = '"content":"w0' in answer.text
                if answer.status_code != 200 or ('"error"' in answer.text and not begun):
                    failures.append(answer.text[-300:])
                served[answer.headers.get("x-kv-replica", "?")] += 1
                turns = min(turns + 2, 9)

    users = [threading.Thread(target=user, args=(number,)) for number in range(6)]
    for thread in users:
        thread.start()
    try:
        wait_for(lambda: min(served["coder-1"], served["coder-2"]) >= 3, seconds=30)
        victim.kill()
        at_death = served["coder-2"]
        wait_for(lambda: served["coder-2"] >= at_death + 30, seconds=40)
    finally:
        stop.set()
        for thread in users:
            thread.join()
        victim.start()
        victim.ready()
    assert failures == []
    wait_for(lambda: rig.in_flight() == 0, seconds=15)
    assert any(value > 0 for name, value in rig.metrics().items() if "_failovers_total" in name)

    def back() -> bool:
        return any(rig.proxy.ask(session(f"back {n}", 1, 100)).headers["x-kv-replica"] == "coder-1" for n in range(12))

    wait_for(back, seconds=30, every=0.5)


def test_restarted_replica_with_an_nvme_tier_keeps_its_sessions(rig: Rig) -> None:
    """Sessions of a replica that was gone come back to it, and its tier answers for their prompts."""
    home = "coder-2"
    mine = [n for n in range(16) if rig.proxy.ask(session(f"tier {n}", 1)).headers["x-kv-replica"] == home]
    assert len(mine) >= 2
    rig.coder[1].kill()
    answer = rig.proxy.ask(session(f"tier {mine[0]}", 3))
    assert (answer.status_code, answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]) == (
        200,
        "coder-1",
        "failover",
    )
    rig.coder[1].start()
    rig.coder[1].ready()
    fresh = itertools.count()
    wait_for(
        lambda: rig.proxy.ask(session(f"probe {next(fresh)}", 1, 100)).headers["x-kv-replica"] == home,
        seconds=30,
        every=0.3,
    )
    for n in mine[1:]:
        answer = rig.proxy.ask(session(f"tier {n}", 3))
        assert (answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]) == (home, "prefix")
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.4 * usage["prompt_tokens"]
    assert rig.proxy.ask(session(f"tier {mine[0]}", 5)).headers["x-kv-replica"] == "coder-1"


def test_order_falls_back_when_all_of_the_first_are_gone(rig: Rig) -> None:
    """With every replica of order 1 dead, the one of order 2 answers, without an error."""
    for server in rig.large[:3]:
        server.kill()
    try:
        answer = rig.proxy.ask(session("fallback", 1, chars=200), model="large")
        assert answer.status_code == 200
        assert answer.headers["x-kv-replica"] == "large-4"
    finally:
        for server in rig.large[:3]:
            server.start()
            server.ready()
