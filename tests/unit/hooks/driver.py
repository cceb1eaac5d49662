"""Drives the hook as LiteLLM does, without a proxy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("litellm", reason="LiteLLM is not installed")

from litellm_hooks.hook import PrefixAffinity
from litellm_hooks.settings import Settings


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
