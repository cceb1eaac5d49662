"""The places where the hook looks into LiteLLM, each of them guarded: a LiteLLM that looks different loses a feature,
never a request. Checked against 1.106.12."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from litellm_hooks.replica import Deployment, section
from litellm_hooks.tenants import is_vllm

_CHARS_A_TOKEN_AT_LEAST = 0.66
"""No tokenizer in use spends more than three tokens on two characters of running text."""


def running_router() -> Any | None:
    """The proxy's router, where this process is a proxy."""
    proxy = sys.modules.get("litellm.proxy.proxy_server")
    return getattr(proxy, "llm_router", None)


def one_of_several() -> bool:
    """Whether this process is one of a server's workers: uvicorn starts them as children, gunicorn forks them."""
    return multiprocessing.parent_process() is not None or "gunicorn" in os.environ.get("SERVER_SOFTWARE", "")


def redis_cache(router: Any | None) -> Any | None:
    """LiteLLM's own Redis: the proxy's, else the router's, else the response cache's."""
    proxy = sys.modules.get("litellm.proxy.proxy_server")
    found = getattr(proxy, "redis_usage_cache", None)
    if found is None:
        found = getattr(getattr(router, "cache", None), "redis_cache", None)
    if found is None:
        inner = getattr(getattr(sys.modules.get("litellm"), "cache", None), "cache", None)
        found = inner if hasattr(inner, "init_async_client") else None
    return found


async def tagged(
    router: Any | None, group: str, deployments: Sequence[Deployment], request: Mapping[str, Any]
) -> list[Deployment] | None:
    """The deployments that LiteLLM's tag rules and routing plugins leave; None where that cannot be told, or where
    they leave none and LiteLLM itself had better say so."""
    untagged = None if any(map(_has_tags, deployments)) else list(deployments)
    if router is None:
        return untagged
    bucket = "litellm_metadata" if "litellm_metadata" in request else "metadata"
    metadata = request.get(bucket)
    looked_at = {**request, bucket: dict(metadata)} if isinstance(metadata, Mapping) else dict(request)
    try:
        from litellm.router_strategy.tag_based_routing import get_deployments_for_tag

        kept: Any = await get_deployments_for_tag(
            llm_router_instance=router,
            model=group,
            request_kwargs=looked_at,
            healthy_deployments=list(deployments),
            metadata_variable_name=bucket,
        )
        if getattr(router, "routing_plugins", None):
            kept = router._filter_by_routing_plugin_candidates(healthy_deployments=kept, request_kwargs=looked_at)
    except (ImportError, AttributeError, TypeError):
        # Another LiteLLM (1.110 asks for more). Where nothing has tags, or they are off, there is nothing to do.
        return list(deployments) if _tags_are_off(router, deployments, request) else untagged
    except Exception:
        return None
    return list(kept) or None


def _tags_are_off(router: Any, deployments: Sequence[Deployment], request: Mapping[str, Any]) -> bool:
    return (
        getattr(router, "enable_tag_filtering", None) is False
        and request.get("enable_tag_filtering") is not True
        and all(section(deployment, "model_info").get("enable_tag_filtering") is None for deployment in deployments)
    )


def _has_tags(deployment: Deployment) -> bool:
    params = section(deployment, "litellm_params")
    return bool(params.get("tags") or params.get("tag_regex"))


async def passes_checks(
    router: Any | None,
    group: str,
    deployment: Deployment,
    messages: Any,
    request: Mapping[str, Any],
    chars: int,
) -> bool:
    """Whether LiteLLM's pre-call checks (context window, rpm, region, parameters) would leave `deployment`, where they
    are on. Tokens are counted only where the window could be too small."""
    if router is None or not getattr(router, "enable_pre_call_checks", False):
        return True
    asked = request.get("input") if messages is None else None
    if messages is None and asked is None:
        return True
    try:
        one = [deployment]
        limit = router._deployment_max_input_tokens(group, deployment)
        tokens: int | None = 0
        if limit is not None and chars / _CHARS_A_TOKEN_AT_LEAST > limit:
            tokens = await router._acount_pre_call_check_tokens(
                model=group, healthy_deployments=one, messages=messages, input=asked, request_kwargs=request
            )
        left = router._pre_call_checks(
            model=group,
            healthy_deployments=one,
            messages=messages,
            input=asked,
            request_kwargs=dict(request),
            input_token_count=tokens,
            skip_inline_token_count=True,
        )
        return bool(left)
    except (AttributeError, TypeError):
        return True
    except Exception:
        return False


def refuse_vllm(router: Any | None, group: object) -> None:
    """Raises `refusal` where a vLLM serves `group`: its cache could not be kept apart."""
    served = router.get_model_list(model_name=group) if router is not None and isinstance(group, str) else None
    if any(is_vllm(section(deployment, "litellm_params")) for deployment in served or []):
        raise refusal(group)


def refusal(group: object) -> Exception:
    """What the proxy answers with 400."""
    from fastapi import HTTPException

    why = f"isolate_by: this endpoint cannot carry the caller's tenant to {group}; use /v1/chat/completions"
    return HTTPException(status_code=400, detail={"error": why})


def response_origin(response_id: object) -> tuple[str | None, str | None]:
    """(deployment id, the engine's own response id) of a response id in any of LiteLLM's forms."""
    if not isinstance(response_id, str) or not response_id:
        return None, None
    try:
        from litellm.responses.utils import ResponsesAPIRequestUtils

        decoded = ResponsesAPIRequestUtils.decode_responses_api_response_id(response_id)
        return decoded.get("model_id") or None, decoded.get("response_id") or response_id
    except Exception:
        return None, response_id
