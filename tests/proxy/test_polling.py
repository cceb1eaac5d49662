"""A proxy that looks at its replicas' metrics, told callers apart by user: what the replicas say of themselves counts,
and a request is its caller's and nobody else's, whatever it says of itself."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import ModelServer, Proxy, example, model_servers, running_proxy, session, wait_for

AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

async def user(request, api_key):
    _, team, user, *_ = api_key.split("-")
    return UserAPIKeyAuth(api_key=api_key, team_id=team, user_id=user)
"""
HOME = {"coder-1": 0, "coder-2": 1}
POLL_S = 0.2


class Rig:
    """`coder-1` without a tier, `coder-2` with one that outlives it, behind one worker."""

    def __init__(self, proxy: Proxy, servers: list[ModelServer], log: Path) -> None:
        self.proxy, self.servers, self.log = proxy, servers, log
        self.names = (f"n{number}" for number in itertools.count())

    def post(self, path: str, body: dict[str, Any], user: str = "ann", key: str = "1", **headers: str) -> Any:
        head = {"Authorization": f"Bearer sk-red-{user}-{key}-0123456789", **headers}
        with httpx.Client(base_url=self.proxy.url, headers=head, timeout=60) as client:
            return client.post(path, json={"model": "coder", **body})

    def ask(self, name: str, turns: int = 1, user: str = "ann", key: str = "1", chars: int = 3000) -> httpx.Response:
        answer = self.post("/v1/chat/completions", {"messages": session(name, turns, chars)}, user, key)
        assert answer.status_code == 200, answer.text[:500]
        return answer

    def home(self, name: str, turns: int = 1, chars: int = 3000) -> tuple[str, str]:
        answer = self.ask(name, turns, chars=chars)
        return answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]

    def new_at(self, replica: str, chars: int = 3000) -> str:
        """The name of a session that has just begun at `replica`."""
        return next(name for name in itertools.islice(self.names, 100) if self.home(name, 1, chars)[0] == replica)

    def spread(self, count: int = 10) -> Counter[str]:
        """Where so many new sessions go."""
        return Counter(self.home(next(self.names))[0] for _ in range(count))

    def gauges(self, replica: str, **values: object) -> None:
        httpx.post(f"{self.servers[HOME[replica]].url}/_gauges", params={k: str(v) for k, v in values.items()})

    def metric(self, name: str) -> float:
        text = self.proxy.client.get("/metrics/").text
        found = re.findall(rf"^litellm_prefix_affinity_{re.escape(name)} (\S+)$", text, re.M)
        return float(found[0]) if found else 0.0

    def errors(self) -> list[str]:
        text = self.proxy.client.get("/metrics/").text
        return re.findall(r"^litellm_prefix_affinity_errors_total.*$", text, re.M)

    def bodies(self, marker: str) -> list[dict[str, Any]]:
        return [r["body"] for s in self.servers for r in s.requests() if marker in json.dumps(r["body"])]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("polling")
    with ExitStack() as stack:
        servers = stack.enter_context(model_servers(folder, ["c1", "c2"], "--tier", "{folder}/{name}.tier"))
        servers[0].options = ()  # its tier is not there after a restart
        log = folder / "decisions.jsonl"
        config = example(
            "coder", servers, isolate_by="user", poll_metrics_s=POLL_S, poll_timeout_s=0.3,
            decision_log=str(log), decision_log_mb=0.01, decision_log_files=3,
        )  # fmt: skip
        config["model_list"][0]["model_info"]["kv_tier"] = "none"
        config["litellm_settings"]["callbacks"].append("prometheus")
        config["litellm_settings"]["require_auth_for_metrics_endpoint"] = False
        config["general_settings"]["custom_auth"] = "tenant_auth.user"
        (folder / "tenant_auth.py").write_text(AUTH)
        yield Rig(stack.enter_context(running_proxy(folder, config)), servers, log)


@pytest.fixture(autouse=True)
def no_gauges(rig: Rig) -> Iterator[None]:
    yield
    for replica in HOME:
        rig.gauges(replica)


LONG = 30_000
"""Characters of a message that is too dear to be moved for a queue of a few requests."""


@pytest.mark.parametrize(
    "says", [{"waiting": 4}, {"running": 4}, {"waiting": 1, "usage": 0.99}], ids=["waiting", "running", "full"]
)
def test_replica_that_says_it_is_loaded_gets_no_new_sessions(rig: Rig, says: dict[str, object]) -> None:
    """Requests that others sent there count, and so does a full KV pool; its own sessions stay, and new ones come again
    when it says that the load is gone."""
    old = rig.new_at("coder-1", LONG)
    rig.gauges("coder-1", **says)
    wait_for(lambda: rig.spread() == {"coder-2": 10}, seconds=10)
    assert rig.home(old, 3, LONG) == ("coder-1", "prefix")
    rig.gauges("coder-1")
    wait_for(lambda: rig.spread()["coder-1"] >= 2, seconds=10)


def test_replica_whose_metrics_hang_keeps_its_sessions_and_gets_new_ones(rig: Rig) -> None:
    """Nothing is known of it then, which is no load and no error, also where it said that it was full before; nor does
    a number that is none end the looking."""
    old = rig.new_at("coder-1", LONG)
    rig.gauges("coder-1", waiting=4, usage="NaN")
    wait_for(lambda: rig.spread() == {"coder-2": 10}, seconds=10)
    rig.gauges("coder-1", hang=1)
    wait_for(lambda: rig.spread()["coder-1"] >= 2, seconds=10)
    assert rig.home(old, 3, LONG) == ("coder-1", "prefix")
    rig.gauges("coder-1", waiting="NaN")
    assert rig.spread()["coder-1"] >= 1
    rig.gauges("coder-1", waiting=4)
    wait_for(lambda: rig.spread() == {"coder-2": 10}, seconds=10)
    rig.gauges("coder-1")
    wait_for(lambda: rig.spread()["coder-1"] >= 2, seconds=10)
    assert not rig.errors()


def test_restarted_replica_is_forgotten_unless_its_tier_survives(rig: Rig) -> None:
    """A restart that no request noticed is seen in the metrics: without a tier nothing is believed to lie there any
    more, and with one the session's next turn is answered from it."""
    names = {replica: rig.new_at(replica) for replica in HOME}
    for server in rig.servers:
        server.kill()
        server.start()
    for server in rig.servers:
        server.ready()
    wait_for(lambda: rig.metric('forgotten_total{cause="restarted"}') == 1, seconds=10)
    assert rig.home(names["coder-1"], 3) == ("coder-1", "rendezvous")
    answer = rig.ask(names["coder-2"], 3)
    assert (answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]) == ("coder-2", "prefix")
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.4 * usage["prompt_tokens"]
    assert rig.metric('forgotten_total{cause="restarted"}') == 1


def test_cache_that_was_lost_is_forgotten_after_two_measured_misses(rig: Rig) -> None:
    """A replica that has evicted a session says so by its answers: after the second one nothing is believed there."""
    name = rig.new_at("coder-2")
    assert rig.home(name, 3) == ("coder-2", "prefix")
    before = rig.metric('forgotten_total{cause="measured"}')
    for turns in (5, 7):
        httpx.post(f"{rig.servers[1].url}/_wipe")
        assert rig.home(name, turns) == ("coder-2", "prefix")
    wait_for(lambda: rig.metric('forgotten_total{cause="measured"}') == before + 1, seconds=10)


def test_call_id_of_the_client_is_no_session(rig: Rig) -> None:
    """A client that sends one x-litellm-call-id with everything has each of its sessions where that began."""
    homes = {name: rig.home(name)[0] for name in itertools.islice(rig.names, 12)}
    assert set(homes.values()) == set(HOME)
    for turns in (3, 5):
        for name, home in homes.items():
            body = {"messages": session(name, turns)}
            answer = rig.post("/v1/chat/completions", body, **{"x-litellm-call-id": "mine"})
            assert (answer.headers["x-kv-replica"], answer.headers["x-kv-reason"]) == (home, "prefix")


def test_users_never_share_a_cache_and_a_users_keys_do(rig: Rig) -> None:
    """With isolate_by: user, one prompt has the salt and tag of its user, by whichever of the user's keys."""
    for user, key in (("ann", "1"), ("ann", "2"), ("bob", "1")):
        rig.ask("shared", 3, user, key)
    bodies = rig.bodies("session shared ")
    salts = [body["cache_salt"] for body in bodies]
    assert sorted(Counter(salts).values()) == [1, 2]
    assert all(body["kv_transfer_params"] == {"lmcache.tag.tenant": body["cache_salt"]} for body in bodies)
    again = {user: rig.ask("shared", 3, user, "3") for user in ("ann", "bob", "eve")}
    cached = {u: a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for u, a in again.items()}
    assert min(cached["ann"], cached["bob"]) > 500
    assert cached["eve"] == 0


FORGED = {"cache_salt": "victim", "kv_transfer_params": {"lmcache.tag.tenant": "victim"}}


@pytest.mark.parametrize(
    ("path", "limit", "prompt"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "{}"}]}),
        ("/v1/completions", "max_tokens", {"prompt": "{}"}),
        ("/v1/responses", "max_output_tokens", {"input": "{}"}),
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "{}"}]}),
    ],
)
def test_fallback_of_the_client_is_still_the_clients(rig: Rig, path: str, limit: str, prompt: dict[str, Any]) -> None:
    """What a client lays over its own request for the case that it fails is not another tenant's either."""
    marker = f"fallen back at {path}"
    body = json.loads(json.dumps(prompt).replace("{}", marker))
    overlay = {"model": "coder", limit: 23, **FORGED, "extra_body": FORGED}
    for server in rig.servers:
        httpx.post(f"{server.url}/_fail", params={"times": "9"})
    answer = rig.post(path, {**body, limit: 20, "num_retries": 0, "fallbacks": [{"coder": [overlay]}]})
    for server in rig.servers:
        httpx.post(f"{server.url}/_fail", params={"times": "0"})
    sent = rig.bodies(marker)
    assert 23 in [body.get(limit) for body in sent], answer.text[:500]
    assert "victim" not in json.dumps(sent)
    assert {body["kv_transfer_params"]["lmcache.tag.tenant"] == body["cache_salt"] for body in sent} == {True}
    assert len({body["cache_salt"] for body in sent}) == 1


GEMINI = {"contents": [{"role": "user", "parts": [{"text": "unmarked"}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1beta/models/coder:generateContent", GEMINI),
        ("/v1beta/models/coder:streamGenerateContent", GEMINI),
        ("/v1beta/interactions", {"input": "unmarked"}),
        ("/vllm/chat/completions", {"messages": [{"role": "user", "content": "unmarked"}]}),
    ],
)
def test_endpoint_that_cannot_carry_the_tenant_is_refused(rig: Rig, path: str, body: dict[str, Any]) -> None:
    """LiteLLM hands no field of these on to vLLM, or all of them as they are: a prompt would lie in a cache that such
    requests share, or in the one that the client names."""
    answer = rig.post(path, {**body, **FORGED})
    assert answer.status_code == 400, answer.text[:500]
    assert "isolate_by" in answer.text
    assert not rig.bodies("unmarked")


def test_log_of_the_proxy_is_rotated_and_holds_no_prompt(rig: Rig) -> None:
    """Of all that was asked here the last few files are left, near their size, whole lines, and not a word of it."""
    files = [rig.log, *(Path(f"{rig.log}.{number}") for number in (1, 2))]

    def all_there() -> bool:
        rig.spread(5)
        return all(path.exists() for path in files)

    wait_for(all_there)
    assert not Path(f"{rig.log}.3").exists()
    for path in files:
        text = path.read_text()
        assert len(text) < 40_000
        assert "history" not in text
        assert {json.loads(line)["event"] for line in text.splitlines()} <= {"decision", "answer", "failed"}
