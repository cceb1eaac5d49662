"""What carries a stream over to another replica when its own dies before the first word.

vLLM sends a stream's headers before it prefills, so for LiteLLM the attempt has succeeded and is not retried; it only
goes on with a request's *fallbacks*. A fallback to the request's own group is such a retry: the hook knows which
replica failed and picks another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def add(data: dict[str, Any], router: Any | None) -> None:
    """Give a streaming request a fallback to its own group, where nobody has configured one for it.

    A request's fallbacks are taken *instead of* the configured ones, which may be of other groups that this request
    comes to (a tier that LiteLLM's own router picks for it), so those go along.
    """
    group = data.get("model")
    if not data.get("stream") or not isinstance(group, str) or "fallbacks" in data or data.get("disable_fallbacks"):
        return
    if router is None or "user_config" in data:  # no router, or one of the client's own: its fallbacks are its matter
        return
    override = data.get("router_settings_override")  # of the caller's key or team; LiteLLM prefers it
    settings = override if isinstance(override, Mapping) else {}
    configured = settings.get("fallbacks")
    if configured is None:
        configured = getattr(router, "fallbacks", None)
    if not isinstance(configured, list):
        configured = []
    if _configured(group, configured):
        return
    asked = (data.get("num_retries"), settings.get("num_retries"), getattr(router, "num_retries", None) or 1)
    # With a parameter beside the name LiteLLM takes it for another attempt than the one that failed.
    again = {"model": group, "num_retries": next(number for number in asked if number is not None)}
    data["fallbacks"] = [*configured, {group: [again]}]


def _configured(group: str, fallbacks: list[Any]) -> bool:
    """Whether these have an entry that LiteLLM may take for `group`: it knows a group also by its name behind the
    provider's, either way round."""
    return any(not isinstance(entry, dict) or any(_means(key, group) for key in entry) for entry in fallbacks)


def _means(key: object, group: str) -> bool:
    return key in (group, "*") or f"/{key}".endswith(f"/{group}") or f"/{group}".endswith(f"/{key}")


async def again(data: dict[str, Any], router: Any | None, attempts: int) -> Any | None:
    """A new stream for a request whose stream failed before its first word, or None where LiteLLM has done all there
    is to do: its fallbacks reach chats, messages and responses, not /v1/completions (1.106.12)."""
    if router is None or "prompt" not in data or "messages" in data or not data.get("fallbacks"):
        return None
    if attempts > (getattr(router, "num_retries", None) or 1):
        return None
    try:
        return await router.atext_completion(**data)
    except (AttributeError, TypeError):  # another LiteLLM
        return None


async def close(stream: Any) -> None:
    """End a stream that took another's place: LiteLLM closes the one that it handed out."""
    for holder in (stream, getattr(stream, "completion_stream", None)):
        end = getattr(holder, "aclose", None)
        if end is not None:
            with suppress(Exception):
                await end()
            return
