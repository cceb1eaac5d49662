"""A replica dies while it prefills for a stream: vLLM has sent its headers by then, and no word of the answer.

In the installed LiteLLM, and in the newest one that starts over its companions.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.overlays import LITELLM, litellm_overlay

from .conftest import KEY, ModelServer, Proxy, example, model_servers, running_proxy, session, wait_for

Rig = tuple[Proxy, list[ModelServer]]


@pytest.fixture(scope="module", params=["installed", LITELLM[0]])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    overlay = None if request.param == "installed" else litellm_overlay()
    folder = tmp_path_factory.mktemp("streams")
    with ExitStack() as stack:
        servers = stack.enter_context(model_servers(folder, ["s1", "s2"]))
        config = example("coder", servers)
        yield stack.enter_context(running_proxy(folder, config, overlay=overlay)), servers


def test_turns_stay(rig: Rig) -> None:
    """Every turn of a session goes to the replica of its first, and both replicas get sessions."""
    proxy, _ = rig
    homes = {
        number: {proxy.ask(session(number, turns, 500)).headers["x-kv-replica"] for turns in (1, 3, 5)}
        for number in range(8)
    }
    assert all(len(home) == 1 for home in homes.values())
    assert set.union(*homes.values()) == {"coder-1", "coder-2"}


BODIES = {
    "/v1/chat/completions": {"messages": session("{name}", 1, 200)},
    "/v1/completions": {"prompt": "{name} " * 100},
    "/v1/responses": {"input": "{name} " * 100},
    "/v1/messages": {"messages": session("{name}", 1, 200)[1:], "max_tokens": 8},
}


@pytest.mark.parametrize("path", BODIES)
def test_replica_that_dies_in_prefill_costs_a_stream_nothing(rig: Rig, path: str) -> None:
    """The stream's first word comes from the other replica, and the client sees no error."""
    proxy, servers = rig

    def body(name: str) -> dict[str, object]:
        filled = json.loads(json.dumps(BODIES[path]).replace("{name}", f"{name} in {path}"))
        return {"model": "coder", "stream": True, **filled}

    def ask(name: str) -> httpx.Response:
        with httpx.Client(base_url=proxy.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            return client.post(path, json=body(name))

    homes = {}
    for number in range(16):
        answer = ask(f"n{number}")
        assert answer.status_code == 200, answer.text
        homes.setdefault(answer.headers["x-kv-replica"], f"n{number}")
    victim, other = servers
    name = homes["coder-1"]
    httpx.post(f"{victim.url}/_hold")
    answers: list[httpx.Response] = []
    user = threading.Thread(target=lambda: answers.append(ask(name)))
    user.start()
    try:
        wait_for(lambda: victim.state()["running"] == 1)
        victim.kill()
        user.join(30)
    finally:
        victim.start()
        victim.ready()
    assert [answer.status_code for answer in answers] == [200], [answer.text for answer in answers]
    assert "error" not in answers[0].text
    assert "w0" in answers[0].text
    assert name in json.dumps(other.requests()[-1]["body"])
    fresh = iter(range(10_000))
    wait_for(lambda: ask(f"back{next(fresh)}").headers["x-kv-replica"] == "coder-1", seconds=30, every=0.3)
