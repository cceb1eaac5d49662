"""What carries a stream over to another replica when its own dies before the first word.

vLLM sends a stream's headers before it prefills, so for LiteLLM the attempt has succeeded and is not retried; it only
goes on with a request's *fallbacks*. A fallback to the request's own group is such a retry: the hook knows which
replica failed and picks another one.
"""

from __future__ import annotations

from typing import Any


def add(data: dict[str, Any], router: Any | None) -> None:
    """Give a streaming request a fallback to its own group, where nobody has configured one for it."""
    group = data.get("model")
    if not data.get("stream") or not isinstance(group, str) or "fallbacks" in data or data.get("disable_fallbacks"):
        return
    if _configured(group, getattr(router, "fallbacks", None)):
        return
    # With a parameter beside the name LiteLLM takes it for another attempt than the one that failed.
    again = {"model": group, "num_retries": getattr(router, "num_retries", None) or 1}
    data["fallbacks"] = [{group: [again]}]


def _configured(group: str, fallbacks: Any) -> bool:
    """Whether the router's own fallbacks have an entry for `group`."""
    if not isinstance(fallbacks, list):
        return False
    return any(not isinstance(entry, dict) or group in entry or "*" in entry for entry in fallbacks)


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
