"""Several proxy workers: agreement with and without Redis, tenants, tags, and what a wrong configuration does."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import statistics
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import (
    KEY,
    ROOT,
    ModelServer,
    Process,
    Proxy,
    example,
    free_port,
    model_servers,
    proxy_command,
    proxy_environment,
    running_proxy,
    session,
    wait_for,
)

AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

async def user(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, team_id=api_key.split("-")[1], user_id=api_key)
"""


def ask(proxy: Proxy, messages: list[dict[str, Any]], model: str, key: str = KEY, **body: Any) -> httpx.Response:
    """One request over a connection of its own, so that any worker may take it."""
    with httpx.Client(base_url=proxy.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        answer = client.post("/v1/chat/completions", json={"model": model, "messages": messages, **body})
    assert answer.status_code == 200, answer.text[:500]
    return answer


def decisions(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if line["event"] == "decision"]


class Four:
    """Four workers without Redis, callers told apart by team, tags on, in front of four replicas."""

    def __init__(self, proxy: Proxy, servers: list[ModelServer], log: Path) -> None:
        self.proxy, self.servers, self.log = proxy, servers, log

    def bodies(self, marker: str) -> list[dict[str, Any]]:
        return [r["body"] for s in self.servers for r in s.requests() if marker in json.dumps(r["body"])]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    folder = tmp_path_factory.mktemp("four-workers")
    with ExitStack() as stack:
        servers = stack.enter_context(model_servers(folder, ["l1", "l2", "l3", "l4"]))
        log = folder / "decisions.jsonl"
        config = example("large", servers, decision_log=str(log), isolate_by="team", strip_billing_header=True)
        for entry in config["model_list"]:
            del entry["litellm_params"]["order"]
            entry["litellm_params"]["weight"] = 1
        tagged = json.loads(json.dumps(config["model_list"]))
        for number, entry in enumerate(tagged):
            entry["model_name"] = "tagged"
            entry["model_info"]["id"] += "-tagged"
            entry["litellm_params"]["tags"] = ["paid" if number else "free"]
            entry["litellm_params"]["weight"] = 0 if number == 3 else 1
        tagged[2]["model_info"]["lora"] = "sql"
        config["model_list"] += tagged
        config["router_settings"]["enable_tag_filtering"] = True
        config["general_settings"]["custom_auth"] = "tenant_auth.user"
        (folder / "tenant_auth.py").write_text(AUTH)
        yield Four(stack.enter_context(running_proxy(folder, config, workers=4)), servers, log)


def test_four_workers_agree_without_redis(four: Four) -> None:
    """Every turn of a session goes to one replica whichever worker takes it, and several workers take turns."""
    for number in range(6):
        homes = {
            ask(four.proxy, session(f"agree {number}", turns), "large").headers["x-kv-replica"]
            for turns in (1, 3, 5, 7)
        }
        assert len(homes) == 1
    assert len({line["worker"] for line in wait_for(lambda: decisions(four.log))}) >= 2


def test_tenants_never_share_a_cache(four: Four) -> None:
    """One prompt of two teams: salt and tag differ, no block is shared, a forged salt is overwritten, and two keys of
    one team have one cache."""
    messages = session("tenants", 3)
    red, blue = "sk-red-0123456789", "sk-blue-0123456789"
    ask(four.proxy, messages, "large", key=red)
    own = ask(four.proxy, messages, "large", key="sk-red-9876543210").json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]
    (salt,) = {body["cache_salt"] for body in four.bodies("session tenants ")}
    forged = {
        "cache_salt": salt,
        "kv_transfer_params": {"lmcache.tag.tenant": salt},
        "additional_drop_params": ["cache_salt"],
    }
    other = ask(four.proxy, messages, "large", key=blue, **forged).json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]
    assert own > 500
    assert other == 0
    bodies = four.bodies("session tenants ")
    assert len({body["cache_salt"] for body in bodies}) == 2
    assert all(body["kv_transfer_params"] == {"lmcache.tag.tenant": body["cache_salt"]} for body in bodies)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "salted completion"}),
        ("/v1/responses", {"input": "salted response"}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "salted message"}]}),
    ],
)
def test_every_endpoint_carries_the_tenant(four: Four, path: str, body: dict[str, Any]) -> None:
    """Salt and tag reach the replica from every endpoint, over what the client says in extra_body."""
    answer = four.proxy.client.post(path, json={"model": "large", "extra_body": {"cache_salt": "forged"}, **body})
    assert answer.status_code == 200, answer.text[:500]
    (sent,) = four.bodies("salted " + path.rsplit("/", 1)[1].removesuffix("s"))
    assert len(sent["cache_salt"]) == 32
    assert sent["kv_transfer_params"] == {"lmcache.tag.tenant": sent["cache_salt"]}


def test_tags_weight_zero_and_lora(four: Four) -> None:
    """A pin never crosses a tag, a drained replica gets nothing, a LoRA's requests carry its name."""
    for number in range(16):
        messages = session(f"tags {number}", 1, chars=300)
        assert (
            ask(four.proxy, messages, "tagged", metadata={"tags": ["free"]}).headers["x-kv-replica"] == "large-1-tagged"
        )
        homes = {
            ask(four.proxy, session(f"tags {number}", turns, 300), "tagged", metadata={"tags": ["paid"]}).headers[
                "x-kv-replica"
            ]
            for turns in (3, 5)
        }
        assert len(homes) == 1
        assert homes <= {"large-2-tagged", "large-3-tagged"}
    adapted = [r["body"] for r in four.servers[2].requests() if "session tags" in json.dumps(r["body"])]
    assert adapted
    assert all(body["kv_transfer_params"]["lmcache.tag.lora"] == "sql" for body in adapted)


def test_billing_line_is_not_sent(four: Four) -> None:
    """With strip_billing_header the line is gone from what the replica gets; the rest of the system prompt is not."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1;"},
        {"type": "text", "text": "You are Claude Code, billed."},
    ]
    body = {"model": "large", "max_tokens": 4, "system": system, "messages": [{"role": "user", "content": "hi"}]}
    assert four.proxy.client.post("/v1/messages", json=body).status_code == 200
    (sent,) = four.bodies("Claude Code, billed.")
    assert "x-anthropic-billing-header" not in json.dumps(sent)


def test_workers_share_moves_and_load_by_redis(tmp_path: Path, redis_url: tuple[str, Process, int]) -> None:
    """With Redis a moved session is found by every worker, load counts everywhere, and Redis stopped, then gone, costs
    neither an error nor 5 ms a decision."""
    host, redis, port = redis_url
    log = tmp_path / "decisions.jsonl"
    with ExitStack() as stack:
        servers = stack.enter_context(model_servers(tmp_path, ["c1", "c2"], "--decode-ms", "60"))
        config = example("coder", servers, decision_log=str(log), spill_tokens=2000, decode_tokens=4000)
        config["general_settings"]["coordination_redis"] = {"host": host, "port": port}
        proxy = stack.enter_context(running_proxy(tmp_path, config, workers=2))
        for number in range(8):  # both workers have begun, and begun to exchange
            ask(proxy, session(f"warm {number}", 1, 100), "coder")
        wait_for(
            lambda: (
                len({line["worker"] for line in decisions(log)}) == 2
                or ask(proxy, session("w", 1, 100), "coder") is None
            )
        )
        homes = {n: ask(proxy, session(f"home {n}", 1, 100), "coder").headers["x-kv-replica"] for n in range(8)}
        blocker = next(n for n, home in homes.items() if home == "coder-1")
        stop = threading.Event()

        def hold() -> None:
            body = {"model": "coder", "messages": session(f"home {blocker}", 3, 100), "stream": True, "max_tokens": 400}
            while not stop.is_set():
                with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if stop.is_set():
                            break

        def place(messages: list[dict[str, Any]]) -> str:
            return str(ask(proxy, messages, "coder").headers["x-kv-replica"])

        def pushed() -> int:
            return sum(place(session(f"push {next(fresh)}", 1, 100)) == "coder-2" for _ in range(6))

        fresh = itertools.count()
        holder = threading.Thread(target=hold)
        holder.start()
        try:
            wait_for(lambda: servers[0].state()["running"] > 0)
            # Shared load lags by the tenth of a second between two exchanges: most, not all, new sessions move.
            wait_for(lambda: pushed() >= 5, seconds=20)
            places = {n: place(session(f"move {n}", 1, 2000)) for n in range(8)}
        finally:
            stop.set()
            holder.join()
        moved = [n for n, home in places.items() if home == "coder-2"]
        assert len(moved) >= 5
        wait_for(lambda: servers[0].state()["running"] == 0)
        spilled = {line["session"] for line in decisions(log) if line["reason"] == "spill"}
        assert spilled
        before = len(decisions(log))
        asked = itertools.count()

        def known_to_both() -> bool:
            """Asks on: a worker may take many connections in a row."""
            turn = next(asked)
            n, turns = moved[turn % len(moved)], 3 + 2 * (turn // len(moved))
            assert ask(proxy, session(f"move {n}", turns, 2000), "coder").headers["x-kv-replica"] == "coder-2"
            by = {line["worker"] for line in decisions(log)[before:] if line["session"] in spilled}
            return turn >= 3 * len(moved) and len(by) == 2

        wait_for(known_to_both, seconds=60)
        later = [line for line in decisions(log)[before:] if line["session"] in spilled]
        assert {d["reason"] for d in later} == {"prefix"}

        for sign in (signal.SIGSTOP, signal.SIGKILL):
            redis.child.send_signal(sign)
            marks = len(decisions(log))
            for number in range(4):
                ask(proxy, session(f"without {sign} {number}", 1, 500), "coder")
            later = wait_for(lambda since=marks: decisions(log)[since:] if len(decisions(log)) >= since + 4 else None)
            assert statistics.median(line["took_us"] for line in later) < 5000


def test_wrong_setting_ends_the_start(tmp_path: Path) -> None:
    """A proxy with a setting that cannot work does not start, and says which and why."""
    config: dict[str, Any] = {
        "model_list": [],
        "litellm_settings": {"callbacks": ["litellm_hooks.prefix_affinity.instance"]},
        "callback_settings": {"prefix_affinity": {"load_bond": 2}},
        "general_settings": {"master_key": KEY},
    }
    command = proxy_command(tmp_path, config, free_port(), workers=1)
    done = subprocess.run(
        command, env=proxy_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "ConfigError: callback_settings.prefix_affinity.load_bond: found a setting of that name" in said
    assert "Did you mean 'load_bound'?" in said


def test_shadowing_callback_file_is_said_at_start(tmp_path: Path) -> None:
    """A copy of the package beside the configuration runs instead of the installed one: the log says so at start."""
    shutil.copytree(ROOT / "litellm_hooks", tmp_path / "config" / "litellm_hooks")
    with model_servers(tmp_path, ["c1", "c2"]) as servers:
        folder = tmp_path / "config"
        with running_proxy(folder, example("coder", servers)) as proxy:
            assert "shadows the installed" in proxy.log()
            assert proxy.ask(session(1, 1)).headers["x-kv-replica"]
