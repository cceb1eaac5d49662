"""Replicas come and go while sessions run: LiteLLM's real Router with the hook, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import litellm
import pytest
from litellm.types.router import Deployment

from litellm_hooks.hook import PrefixAffinity
from litellm_hooks.settings import Settings

from .conftest import ModelServer, model_servers, session

SESSIONS = range(60)


def deployment(server: ModelServer, weight: int = 1) -> dict[str, Any]:
    params = {"model": "hosted_vllm/tiny", "api_base": server.base, "api_key": "none", "weight": weight}
    return {"model_name": "coder", "litellm_params": params, "model_info": {"id": server.name}}


@asynccontextmanager
async def routing(servers: list[ModelServer]) -> AsyncIterator[litellm.Router]:
    router = litellm.Router(model_list=[deployment(server) for server in servers], num_retries=3)
    hook = PrefixAffinity(Settings(), router)
    before = list(litellm.callbacks)
    litellm.callbacks = [*before, hook]
    try:
        yield router
    finally:
        litellm.callbacks = before
        await hook.close()


async def homes(router: litellm.Router, turns: int, sessions: range = SESSIONS) -> dict[int, str]:
    """Where each session's request of so many messages was answered."""
    found = {}
    for number in sessions:
        answer = await router.acompletion(model="coder", messages=session(number, turns, 300))
        found[number] = answer._hidden_params["model_id"]
    return found


@pytest.fixture
def servers(tmp_path: Path) -> Any:
    with model_servers(tmp_path, ["a", "b", "c"]) as started:
        yield started


def test_added_replica_gets_new_sessions_and_takes_no_old_one(servers: list[ModelServer]) -> None:
    """Sessions stay where their prefix lies; of those that begin, the new replica gets its share at once."""

    async def work() -> None:
        async with routing(servers[:2]) as router:
            first = await homes(router, 1)
            router.add_deployment(Deployment(**deployment(servers[2])))
            assert await homes(router, 3) == first
            new = await homes(router, 1, range(1000, 1060))
            assert 10 <= list(new.values()).count("c") <= 30

    asyncio.run(work())


def test_drained_replica_gets_nothing_and_its_sessions_move_once(servers: list[ModelServer]) -> None:
    """With weight 0 its sessions go elsewhere and stay there, those of the others do not move; nothing fails."""

    async def work() -> None:
        async with routing(servers) as router:
            first = await homes(router, 1)
            assert set(first.values()) == {"a", "b", "c"}
            router.upsert_deployment(Deployment(**deployment(servers[2], weight=0)))
            drained = await homes(router, 3)
            assert "c" not in drained.values()
            assert all(drained[number] == home for number, home in first.items() if home != "c")
            assert await homes(router, 5) == drained

    asyncio.run(work())


def test_removed_replica_costs_no_request(servers: list[ModelServer]) -> None:
    """A replica that is taken out of the list while requests run: all are answered, by the others from then on."""

    async def work() -> None:
        async with routing(servers) as router:
            first = await homes(router, 1)
            running = asyncio.gather(homes(router, 3), homes(router, 1, range(2000, 2060)))
            await asyncio.sleep(0)
            router.delete_deployment("b")
            servers[1].kill()
            await running
            after = await homes(router, 5)
            assert set(after.values()) == {"a", "c"}
            assert all(after[number] == home for number, home in first.items() if home != "b")

    asyncio.run(work())
