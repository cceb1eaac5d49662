"""What an answer says of its tokens, in any of the forms LiteLLM has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litellm_hooks.affinity import Usage


def usage_of(response: Any) -> Usage | None:
    """Prompt and cached tokens of an answer in any of LiteLLM's forms, None where there are none."""
    usage = response.get("usage") if isinstance(response, Mapping) else getattr(response, "usage", None)
    if usage is None:
        return None

    def field(holder: Any, *names: str) -> Any:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if value is not None:
                return value
        return None

    prompt = field(usage, "prompt_tokens", "input_tokens")
    if not isinstance(prompt, int):
        return None
    details = field(usage, "prompt_tokens_details", "input_tokens_details")
    cached = field(details, "cached_tokens") if details is not None else None
    return Usage(prompt, cached if isinstance(cached, int) else None)
