"""What a user writes under ``adapter_params`` of ``--l2-adapter``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings, parse_tier_settings

WHERE = "adapter_params of --l2-adapter"
# A lookup waits this long for the store behind, unless the user says otherwise: a prefill of a thousand tokens.
BEHIND_TIMEOUT_S = 1.0
# Settings of the in-process plugin that mean nothing here.
_NOT_HERE = {
    "store_wait_ms": "stores run behind the engine's step anyway",
    "self_test": "the server sees no paged KV that it could compare with",
}
_OWN = ("unmarked_models", "behind", "behind_timeout_s")
_UNMARKED = ("refuse", "by-path")


class MpSettings(msgspec.Struct, frozen=True):
    """`unmarked_models`: what becomes of keys that carry no engine's mark (see `identity`). `behind`: the JSON object
    of one of LMCache's own L2 adapters that several hosts share."""

    tier: NvmeSettings
    unmarked_models: Literal["refuse", "by-path"] = "refuse"
    behind: dict[str, Any] | None = None
    behind_timeout_s: float = BEHIND_TIMEOUT_S


def parse_params(params: Mapping[str, Any]) -> MpSettings:
    """Raises `ConfigError` for an unknown key, or a missing or malformed value."""
    for name, why in _NOT_HERE.items():
        if name in params:
            raise ConfigError(name, repr(params[name]), "nothing in this door", f"Remove it: {why}.")
    tier = parse_tier_settings(params, _OWN, where=WHERE)
    unmarked = params.get("unmarked_models", "refuse")
    if unmarked not in _UNMARKED:
        raise ConfigError("unmarked_models", repr(unmarked), ", ".join(_UNMARKED), "Remove it for the safe default.")
    timeout = params.get("behind_timeout_s", BEHIND_TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 3600:
        raise ConfigError("behind_timeout_s", repr(timeout), "seconds, above 0 and below 3600", "Set it to 1.")
    return MpSettings(tier, unmarked, _behind(params.get("behind")), float(timeout))


def _behind(value: Any) -> dict[str, Any] | None:
    return None if value is None else check_behind(value)


def check_behind(value: Any) -> dict[str, Any]:
    """What can be known of the store behind without LMCache. Raises `ConfigError`."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ConfigError(
            "behind", repr(value), "an object as --l2-adapter takes it, with a type",
            'Write, for one, {"type": "resp", "host": "redis.example", "port": 6379}.',
        )  # fmt: skip
    if value["type"] in _LOCAL_TYPES:
        raise ConfigError(
            "behind", f"type {value['type']}", "a store that several hosts share, such as resp, valkey, s3 or fs",
            "Take another type: this one is of one host, or needs LMCache's own memory registered with it.",
        )  # fmt: skip
    for key in ("serde", "eviction"):
        if key in value:
            raise ConfigError(
                f"behind.{key}", repr(value[key]), "nothing", "Remove it: the store behind is written to and read from."
            )
    return dict(value)


# Of one host, of a peer's memory, or bound to memory that LMCache registers and this door must not lend: what comes
# late from behind must never be written to where another chunk lies by then.
_LOCAL_TYPES = (
    *("plugin", "native_plugin", "p2p", "dax", "raw_block", "nixl_store", "nixl_store_dynamic", "nixl_native"),
    *("mock", "fault_inject"),
)
