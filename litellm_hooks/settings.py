"""The hook's settings: one struct, read once from LiteLLM's `callback_settings` and the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from litellm_hooks.errors import ConfigError

SECTION = "prefix_affinity"
ENVIRONMENT = "PREFIX_AFFINITY_"
IsolateBy = Literal["none", "key", "team", "user"]
KvTier = Literal["nvme", "ram", "none"]
KV_TIERS: tuple[str, ...] = get_args(KvTier)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All optional. An environment variable `PREFIX_AFFINITY_<NAME>` wins over the file."""

    load_bound: float = 1.25
    """Times the mean work in flight at which sessions leave a replica, come what may (with `bound_slack_tokens`)."""
    bound_slack_tokens: float = 200_000.0
    """Work, in prompt tokens, that every replica may hold before `load_bound` counts."""
    move_cost: float = 8.0
    """How many tokens of waiting a token that a move prefills again is worth."""
    spill_tokens: float = 2048.0
    """Difference of load under which a session stays, or a new one goes to the first of its order."""
    blind_spill_tokens: float = 65_536.0
    """The same where several workers run without Redis and do not hear of each other's sessions."""
    decode_tokens: float = 256.0
    """What a running answer weighs as load, in tokens waiting to be prefilled."""
    table_entries: int = 200_000
    """Prefixes remembered, about 200 bytes each."""
    lease_ttl_s: float = 900.0
    """Longest time a call counts as load when no hook reports its end."""
    prefill_tokens_per_s: float = 4000.0
    """Prefill rate assumed for a replica until one was seen."""
    chars_per_token: float = 4.0
    """Characters of prompt a token, until the answers told."""
    isolate_by: IsolateBy = "none"
    """Whose requests share a cache: everybody's, or those of one key, team or user."""
    strip_billing_header: bool = False
    """Remove Claude Code's per-request billing line from what is sent, so that vLLM's cache can hit behind it."""
    share_by_redis: bool = True
    """Share moved sessions and load through LiteLLM's Redis, where it has one."""
    poll_metrics_s: float = 0.0
    """Seconds between two looks at each replica's /metrics; 0: never."""
    poll_timeout_s: float = 1.0
    response_headers: bool = False
    """Answer with `x-kv-replica` and `x-kv-reason`."""
    decision_log: str | None = None
    """File that gets a JSON line a decision and a line an answer."""
    decision_log_mb: float = 64.0
    """Size at which the file is rotated."""
    decision_log_files: int = 4
    """Files kept, the current one included."""


_FLOORS: Mapping[str, float] = {
    "load_bound": 1.0,
    "bound_slack_tokens": 0.0,
    "move_cost": 1.0,
    "spill_tokens": 0.0,
    "blind_spill_tokens": 0.0,
    "decode_tokens": 0.0,
    "table_entries": 1000,
    "lease_ttl_s": 1.0,
    "prefill_tokens_per_s": 1.0,
    "chars_per_token": 0.5,
    "poll_metrics_s": 0.0,
    "poll_timeout_s": 0.01,
    "decision_log_mb": 0.001,
    "decision_log_files": 1,
}
_FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}


def _allowed(name: str) -> str:
    kind = _FIELDS[name].type
    if kind == IsolateBy:
        return ", ".join(get_args(IsolateBy))
    words = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "a path or nothing")
    return f"{words} of at least {_FLOORS[name]:g}" if name in _FLOORS else words


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"Did you mean {close[0]!r}?" if close else "Remove it."


def _field(where: str, name: str, value: object, strict: bool) -> object:
    try:
        if isinstance(value, bool) and _FIELDS[name].type is not bool:
            raise msgspec.ValidationError("a bool")
        parsed = msgspec.convert(value, _FIELDS[name].type, strict=strict)
    except msgspec.ValidationError:
        raise ConfigError(where, repr(value), _allowed(name), "Correct it, or remove it for the default.") from None
    floor = _FLOORS.get(name)
    if floor is not None and not (isinstance(parsed, int | float) and floor <= parsed < float("inf")):
        raise ConfigError(where, repr(value), _allowed(name), "Correct it, or remove it for the default.")
    return parsed


def load_settings(callback_settings: object, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in LiteLLM's `callback_settings` (None where there is none) under those of the environment.

    Raises ConfigError for a name that is not a setting, a value of a wrong type, and a value below its bound.
    """
    values: dict[str, Any] = {}
    if callback_settings is not None and not isinstance(callback_settings, Mapping):
        raise ConfigError(
            "callback_settings", type(callback_settings).__name__, "a mapping", "Indent the callbacks' settings."
        )
    sections: Mapping[str, Any] = callback_settings or {}
    if SECTION not in sections:
        for key in sections:
            if difflib.SequenceMatcher(None, str(key), SECTION).ratio() > 0.8:
                raise ConfigError(f"callback_settings.{key}", repr(key), SECTION, f"Rename it to {SECTION!r}.")
    section = sections.get(SECTION)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"callback_settings.{SECTION}", repr(section), "a mapping of settings", "Indent the settings."
        )
    for name, value in (section or {}).items():
        where = f"callback_settings.{SECTION}.{name}"
        if name not in _FIELDS:
            raise ConfigError(where, "a setting of that name", ", ".join(_FIELDS), _nearest(str(name)))
        values[name] = _field(where, name, value, strict=True)
    for key, text in (os.environ if environment is None else environment).items():
        if not key.startswith(ENVIRONMENT):
            continue
        name = key.removeprefix(ENVIRONMENT).lower()
        if name not in _FIELDS:
            raise ConfigError(key, "a setting of that name", ", ".join(_FIELDS), _nearest(name))
        values[name] = _field(key, name, text, strict=False)
    return Settings(**values)
