"""The settings in vLLM's configuration, read without vLLM: the front process checks them before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_nvme_backend.doors import refusals
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings, parse_tier_settings, tier_names

# Where `front` leaves the digest of the model's configuration.
HF_CONFIG = "kvtier.hf_config"
# Keys of the extra config that are vLLM's own, or that.
_VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    HF_CONFIG,
)
_WHERE = "kv_connector_extra_config in --kv-transfer-config"


def settings_of(extra_config: Mapping[str, Any]) -> NvmeSettings:
    """Raises `ConfigError`, with the names that the user wrote."""
    return parse_tier_settings(extra_config, _VLLM_KEYS, where=_WHERE)


def names_this_door(transfer: Mapping[str, Any]) -> bool:
    """Whether a ``--kv-transfer-config`` names the spec or its connector."""
    extra = transfer.get("kv_connector_extra_config")
    spec = extra.get("spec_name") if isinstance(extra, Mapping) else None
    return transfer.get("kv_connector") == "NvmeOffloadingConnector" or spec == "NvmeOffloadingSpec"


def check_front(transfer: Mapping[str, Any]) -> None:
    """What can be known of it without an engine. Raises `ConfigError`."""
    from lmcache_nvme_backend.store import StoreSettings
    from lmcache_nvme_backend.store.opening import check_root

    extra = transfer.get("kv_connector_extra_config")
    settings = settings_of(extra if isinstance(extra, Mapping) else {})
    check_connector(transfer.get("kv_connector"))
    refusals.check_policy(transfer.get("kv_load_failure_policy", "fail"))
    with tier_names():
        check_root(Path(settings.path), StoreSettings(settings.quota_bytes))


def check_connector(name: str | None) -> None:
    """Raises `ConfigError` where a load that fails would end the engine."""
    if name != "NvmeOffloadingConnector":
        raise ConfigError(
            "kv_connector", repr(name) if name else "another one", "NvmeOffloadingConnector with NvmeOffloadingSpec",
            'Set "kv_connector": "NvmeOffloadingConnector" and "kv_connector_module_path": "lmcache_nvme_backend" in '
            "--kv-transfer-config: with vLLM's own connector, a load that fails ends the engine.",
        )  # fmt: skip
