"""Keeps tenants' caches apart: what goes into a request so that neither vLLM nor LMCache ever mixes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from typing import Any

from litellm_hooks.settings import IsolateBy

TENANT_TAG = "lmcache.tag.tenant"
LORA_TAG = "lmcache.tag.lora"
_OWN_TAGS = (TENANT_TAG, LORA_TAG)
_OWN_FIELDS = ("cache_salt", "kv_transfer_params")
_VLLM_PROVIDERS = frozenset(
    {"hosted_vllm", "vllm", "openai", "custom_openai", "text-completion-openai", "openai_like", "litellm_proxy"}
)
_GENERATION = frozenset(
    {"completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses",
     "anthropic_messages", "aanthropic_messages"}
)  # fmt: skip

_UNMARKED = frozenset(
    {"generate_content", "agenerate_content", "agenerate_content_stream", "create_interaction", "acreate_interaction",
     "acompact_responses", "_aresponses_websocket", "_arealtime", "adecisions", "asystemone", "allm_passthrough_route"}
)  # fmt: skip
_FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
# What no model group is called: LiteLLM takes a mapping of such fields to lists for parameters, if another entry is.
_NEVER_GROUPS = (*_OWN_FIELDS, "additional_drop_params", "extra_body", "vllm_xargs")


def tenant_of(isolate_by: IsolateBy, user: Any) -> str | None:
    """The tenant of an authenticated caller (LiteLLM's UserAPIKeyAuth): 32 hex digits, None where nothing is isolated.

    A caller without the team or user asked for is a tenant by key: what cannot be told apart is kept apart.
    """
    if isolate_by == "none":
        return None
    names = {"key": ("api_key",), "team": ("team_id", "api_key"), "user": ("user_id", "api_key")}[isolate_by]
    for name in names:
        value = getattr(user, name, None)
        if value:
            return hashlib.sha256(f"{name}\x1f{value}".encode()).hexdigest()[:32]
    return hashlib.sha256(b"anonymous").hexdigest()[:32]


def is_generation(call_type: object) -> bool:
    return str(getattr(call_type, "value", call_type)) in _GENERATION


def _is_responses(call_type: object) -> bool:
    return str(getattr(call_type, "value", call_type)) in ("responses", "aresponses")


def cannot_be_marked(call_type: object) -> bool:
    """Whether a call of this type makes a model read a prompt, and LiteLLM hands on no field that would tell whose."""
    return str(getattr(call_type, "value", call_type)) in _UNMARKED


def _place(data: MutableMapping[str, Any], responses: bool) -> MutableMapping[str, Any]:
    """Where a field must be put to reach vLLM: LiteLLM hands on unknown fields of every call but /v1/responses, whose
    `extra_body` it merges into the body."""
    if not responses:
        return data
    extra = data.get("extra_body")
    data["extra_body"] = dict(extra) if isinstance(extra, Mapping) else {}
    place: MutableMapping[str, Any] = data["extra_body"]
    return place


def drop_client_values(data: MutableMapping[str, Any], isolated: bool) -> None:
    """Takes out what a client must not say itself: the tags always, where tenants are isolated also the salt, the
    whole of `kv_transfer_params`, and a list of parameters to drop that would take ours out again."""
    places: list[MutableMapping[str, Any]] = [data]
    extra = data.get("extra_body")
    if extra is not None:
        try:
            data["extra_body"] = dict(extra)  # as LiteLLM does, so that pairs are no way round
        except (TypeError, ValueError):
            data["extra_body"] = {}
        places.append(data["extra_body"])
    for place in places:
        if isolated:
            for field in _OWN_FIELDS:
                place.pop(field, None)
            dropped = place.get("additional_drop_params")
            if dropped is not None:
                kept = [n for n in dropped if not str(n).startswith(_OWN_FIELDS)] if isinstance(dropped, list) else []
                place["additional_drop_params"] = kept
        else:
            transfer = place.get("kv_transfer_params")
            if isinstance(transfer, Mapping) and any(tag in transfer for tag in _OWN_TAGS):
                place["kv_transfer_params"] = {k: v for k, v in transfer.items() if k not in _OWN_TAGS}
        arguments = place.get("vllm_xargs")
        if isinstance(arguments, Mapping) and "kv_transfer_params" in arguments:
            place["vllm_xargs"] = {k: v for k, v in arguments.items() if k != "kv_transfer_params"}


def isolate(data: MutableMapping[str, Any], call_type: object, tenant: str | None) -> None:
    """Puts the tenant into the request, over whatever the client said, and into what the client wants sent in its
    place where it fails. Changes `data` in place."""
    drop_client_values(data, isolated=tenant is not None)
    override = data.get("router_settings_override")
    if isinstance(override, Mapping):
        data["router_settings_override"] = override = dict(override)
    for holder in (data, override) if isinstance(override, dict) else (data,):
        for field in _FALLBACKS:
            if isinstance(holder.get(field), list):
                holder[field] = [_isolated_fallback(target, call_type, tenant) for target in holder[field]]
    if tenant is None:
        return
    place = _place(data, _is_responses(call_type))
    place["cache_salt"] = tenant
    place["kv_transfer_params"] = {TENANT_TAG: tenant}


def _isolated_fallback(target: object, call_type: object, tenant: str | None) -> object:
    """A fallback is a name, a mapping of groups to lists of them, or parameters that LiteLLM lays over the request's
    own, the tenant's included."""
    if not isinstance(target, Mapping) or not target:
        return target
    if all(isinstance(value, list) for value in target.values()):
        return {
            group: [_isolated_fallback(inner, call_type, tenant) for inner in targets]
            for group, targets in target.items()
            if tenant is None or group not in _NEVER_GROUPS
        }
    changed = dict(target)
    isolate(changed, call_type, tenant)
    if "extra_body" not in target and _is_responses(call_type):
        changed.pop("extra_body", None)  # the request's own stays then, with the tenant and all else that is in it
    return changed


def adapt_to_deployment(
    kwargs: Mapping[str, Any], call_type: object, lora: str | None, isolated: bool
) -> dict[str, Any] | None:
    """The request as the picked deployment needs it, None where it is right already: a LoRA's name as a tag of its
    own, and neither tag nor salt for a provider that is no vLLM and would refuse them."""
    vllm = is_vllm(kwargs)
    if vllm and lora is not None:
        changed = dict(kwargs)
        place = _place(changed, _is_responses(call_type))
        transfer = place.get("kv_transfer_params")
        place["kv_transfer_params"] = {**(transfer if isinstance(transfer, Mapping) else {}), LORA_TAG: lora}
        return changed
    if not vllm and isolated:
        changed = {key: value for key, value in kwargs.items() if key not in _OWN_FIELDS}
        extra = changed.get("extra_body")
        if isinstance(extra, Mapping):
            changed["extra_body"] = {key: value for key, value in extra.items() if key not in _OWN_FIELDS}
        return changed
    return None


def is_vllm(kwargs: Mapping[str, Any]) -> bool:
    """Whether a deployment's parameters, or a call's, lead to a vLLM or something that may be one."""
    provider = kwargs.get("custom_llm_provider")
    if not provider:
        head, slash, _ = str(kwargs.get("model", "")).partition("/")
        provider = head if slash else "openai"
    return provider in _VLLM_PROVIDERS and bool(kwargs.get("api_base"))


def strip_billing(data: MutableMapping[str, Any]) -> bool:
    """Removes Claude Code's billing line from the request's system prompt, in place. True where there was one."""
    from litellm_hooks.canonical import BILLING_LINE, without_billing_line

    system = data.get("system")
    if isinstance(system, str) and system.startswith(BILLING_LINE):
        data["system"] = without_billing_line(system)
        return True
    for blocks, set_blocks in _system_blocks(data):
        for index, block in enumerate(blocks):
            text = block.get("text") if isinstance(block, Mapping) else None
            if isinstance(text, str) and text.startswith(BILLING_LINE):
                rest = without_billing_line(text)
                set_blocks([*blocks[:index], *([{**block, "text": rest}] if rest else []), *blocks[index + 1 :]])
                return True
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], Mapping):
        text = messages[0].get("content")
        if messages[0].get("role") == "system" and isinstance(text, str) and text.startswith(BILLING_LINE):
            rest = without_billing_line(text)
            data["messages"] = [*([{**messages[0], "content": rest}] if rest else []), *messages[1:]]
            return True
    return False


def _system_blocks(data: MutableMapping[str, Any]) -> list[tuple[list[Any], Any]]:
    found: list[tuple[list[Any], Any]] = []
    if isinstance(data.get("system"), list):
        found.append((data["system"], lambda blocks: data.__setitem__("system", blocks)))
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], Mapping):
        first = messages[0]
        if first.get("role") == "system" and isinstance(first.get("content"), list):
            found.append(
                (
                    first["content"],
                    lambda blocks: data.__setitem__("messages", [{**first, "content": blocks}, *messages[1:]]),
                )
            )
    return found
