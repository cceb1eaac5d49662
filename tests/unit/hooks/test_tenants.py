"""One tenant's cache is never another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from litellm_hooks.tenants import LORA_TAG, TENANT_TAG, adapt_to_deployment, isolate, strip_billing, tenant_of

ONE = SimpleNamespace(api_key="hash-1", team_id="red", user_id="ann")
VLLM = {"model": "hosted_vllm/tiny", "api_base": "http://a/v1"}


def test_tenants_differ_by_what_they_are_isolated_by() -> None:
    """Callers of one key, team or user share a tenant exactly where asked to, and without one fall back to the key."""
    other_key = SimpleNamespace(api_key="hash-2", team_id="red", user_id="ann")
    assert tenant_of("none", ONE) is None
    assert tenant_of("key", ONE) != tenant_of("key", other_key)
    assert tenant_of("team", ONE) == tenant_of("team", other_key)
    assert tenant_of("user", ONE) == tenant_of("user", other_key)
    homeless = [SimpleNamespace(api_key=f"hash-{i}", team_id=None, user_id=None) for i in range(2)]
    assert tenant_of("team", homeless[0]) != tenant_of("team", homeless[1])
    assert "hash-1" not in str(tenant_of("key", ONE))


@pytest.mark.parametrize("call_type", ["acompletion", "atext_completion", "aresponses", "anthropic_messages"])
@pytest.mark.parametrize(
    "forged",
    [
        {"cache_salt": "victim"},
        {"kv_transfer_params": {TENANT_TAG: "victim", "do_remote_prefill": True}},
        {"extra_body": {"cache_salt": "victim", "kv_transfer_params": {TENANT_TAG: "victim"}}},
        {"additional_drop_params": ["cache_salt", "kv_transfer_params"]},
        {"vllm_xargs": {"kv_transfer_params": "{}"}},
    ],
)
def test_client_cannot_name_a_tenant(call_type: str, forged: dict[str, Any]) -> None:
    """Salt and tag are the tenant's whatever the client says, and nothing of what it said is left."""
    data: dict[str, Any] = {"model": "m", **forged}
    isolate(data, call_type, "t1")
    place = data["extra_body"] if call_type == "aresponses" else data
    assert place["cache_salt"] == "t1"
    assert place["kv_transfer_params"] == {TENANT_TAG: "t1"}
    assert "victim" not in str(data)
    assert not data.get("additional_drop_params")
    assert not data.get("vllm_xargs")


@pytest.mark.parametrize("field", ["fallbacks", "context_window_fallbacks", "content_policy_fallbacks"])
@pytest.mark.parametrize("call_type", ["acompletion", "aresponses"])
def test_client_cannot_name_a_tenant_in_its_fallbacks(call_type: str, field: str) -> None:
    """LiteLLM lays a fallback's parameters over the request: they are the tenant's too, at any depth, and the names of
    groups are what they were."""
    forged = {"model": "m", "cache_salt": "victim", "extra_body": {"cache_salt": "victim"}, "vllm_xargs": {}}
    nested = {"model": "m", field: [{"m": [dict(forged)]}]}
    targets = [{"m": [dict(forged), "large", nested]}, dict(forged), "other"]
    data: dict[str, Any] = {"model": "m", field: targets, "router_settings_override": {field: targets}}
    isolate(data, call_type, "t1")
    assert "victim" not in str(data)
    assert "victim" in str(targets)  # what the proxy keeps of a key or team is not changed
    group, single, name = data[field]
    place = single["extra_body"] if call_type == "aresponses" else single
    assert (place["cache_salt"], place["kv_transfer_params"]) == ("t1", {TENANT_TAG: "t1"})
    assert (group["m"][1], name) == ("large", "other")
    assert data["router_settings_override"][field] == data[field]


@pytest.mark.parametrize("call_type", ["acompletion", "aresponses"])
def test_a_clients_fallback_cannot_take_the_marks_away(call_type: str) -> None:
    """A mapping of parameters to lists looks like one of groups, and LiteLLM lays it over the request where another
    entry names a model; and `extra_body` may be pairs, which LiteLLM makes a mapping of."""
    pairs = [["vllm_xargs", {"kv_transfer_params": {TENANT_TAG: "victim"}}], ["cache_salt", "victim"]]
    leaving = {"additional_drop_params": ["cache_salt", "kv_transfer_params"], "extra_body": pairs}
    data: dict[str, Any] = {"fallbacks": [dict(leaving), {"m": [dict(leaving)]}, {"model": "m", "extra_body": pairs}]}
    isolate(data, call_type, "t1")
    assert "victim" not in str(data) and "additional_drop_params" not in str(data)
    data = {"extra_body": pairs, "vllm_xargs": {"kv_transfer_params": {TENANT_TAG: "victim"}}}
    isolate(data, call_type, "t1")
    assert "victim" not in str(data) and "t1" in str(data)


def test_a_fallback_keeps_what_the_request_itself_asks_for() -> None:
    """A fallback's `extra_body` replaces the request's: one that brings none is given none."""
    data: dict[str, Any] = {"extra_body": {"top_k": 5}, "fallbacks": [{"model": "h"}]}
    isolate(data, "aresponses", "t1")
    assert data["fallbacks"] == [{"model": "h"}]
    assert data["extra_body"] == {"top_k": 5, "cache_salt": "t1", "kv_transfer_params": {TENANT_TAG: "t1"}}


def test_without_isolation_only_the_tags_are_taken_out() -> None:
    """A client's own salt and transfer parameters stay where nothing is isolated, but the tags are never a client's."""
    data: dict[str, Any] = {"cache_salt": "mine", "kv_transfer_params": {TENANT_TAG: "x", LORA_TAG: "y", "other": 1}}
    isolate(data, "acompletion", None)
    assert data == {"cache_salt": "mine", "kv_transfer_params": {"other": 1}}


def test_lora_gets_a_tag_of_its_own() -> None:
    """A deployment's LoRA name is added beside the tenant's tag."""
    kwargs = {**VLLM, "kv_transfer_params": {TENANT_TAG: "t1"}}
    changed = adapt_to_deployment(kwargs, "acompletion", "sql-adapter", isolated=True)
    assert changed is not None
    assert changed["kv_transfer_params"] == {TENANT_TAG: "t1", LORA_TAG: "sql-adapter"}
    assert kwargs["kv_transfer_params"] == {TENANT_TAG: "t1"}


def test_other_providers_see_neither_salt_nor_tag() -> None:
    """A request that falls back to a provider that is no vLLM loses what only vLLM knows."""
    kwargs = {"model": "anthropic/claude", "cache_salt": "t1", "kv_transfer_params": {TENANT_TAG: "t1"}, "n": 1}
    assert adapt_to_deployment(kwargs, "acompletion", None, isolated=True) == {"model": "anthropic/claude", "n": 1}
    assert adapt_to_deployment({**VLLM, "cache_salt": "t1"}, "acompletion", None, isolated=True) is None


LINE = "x-anthropic-billing-header: cc_version=2.1; cch=1f;"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"system": f"{LINE}\nYou are."}, {"system": "You are."}),
        ({"system": [{"type": "text", "text": LINE}, {"type": "text", "text": "You"}]},
         {"system": [{"type": "text", "text": "You"}]}),
        ({"system": [{"type": "text", "text": f"{LINE}\nYou"}]}, {"system": [{"type": "text", "text": "You"}]}),
        ({"messages": [{"role": "system", "content": f"{LINE}\nYou"}]},
         {"messages": [{"role": "system", "content": "You"}]}),
        ({"messages": [{"role": "user", "content": LINE}]}, {"messages": [{"role": "user", "content": LINE}]}),
        ({"system": "You are."}, {"system": "You are."}),
    ],
)  # fmt: skip
def test_billing_line_is_removed_and_nothing_else(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Claude Code's line goes from a system prompt in any of its forms; all other text stays."""
    strip_billing(before)
    assert before == after
