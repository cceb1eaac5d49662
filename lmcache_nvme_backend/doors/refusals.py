"""Configurations this door refuses, each with its reason and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmcache_nvme_backend.errors import ConfigError

_LMCACHE = {
    "use_layerwise": (
        "layer-by-layer transfer asks for one layer of every chunk at a time, which this store does not keep apart",
        "Remove use_layerwise: chunks are loaded whole and in parallel.",
    ),
    "enable_pd": (
        "prefill-decode disaggregation brings its own allocator, and chunks would bypass the NVMe tier",
        "Use LMCache's PD backend without this plugin, or this plugin on a non-disaggregated engine.",
    ),
    "enable_scheduler_bypass_lookup": (
        "the scheduler would open a second backend of its own, in another namespace, and find nothing",
        "Remove enable_scheduler_bypass_lookup: lookups go to the workers.",
    ),
    "enable_blending": (
        "blending recomputes parts of a chunk in place, so what is stored would not be what the key promises",
        "Remove enable_blending.",
    ),
}


def check_lmcache(get: Callable[[str], Any]) -> None:
    """Refuse LMCache settings that cannot work with this backend; ``get`` reads a field or gives ``None``.

    Raises:
        ConfigError: naming the first such setting.
    """
    for field, (why, todo) in _LMCACHE.items():
        if get(field):
            raise ConfigError(field, f"true, but {why}", "false with lmcache_nvme_backend", todo)
    size = get("max_local_cpu_size")
    if size is not None and float(size) <= 0 and get("local_disk"):
        raise ConfigError(
            "local_disk", repr(get("local_disk")), "nothing while max_local_cpu_size is 0",
            "LMCache's own disk backend needs its CPU pool. Remove local_disk: this tier replaces it.",
        )  # fmt: skip


def _short_image_hashes() -> bool:
    try:
        from lmcache.integration.vllm import utils
    except ImportError:
        return False
    return hasattr(utils, "hex_hash_to_int16")


def check_failure_policy(transfer: Any) -> None:
    """As `check_policy`, of vLLM's own configuration."""
    check_policy(str(getattr(transfer, "kv_load_failure_policy", "recompute")))


def check_policy(policy: str) -> None:
    """Raises `ConfigError` where a load that failed would end its request."""
    if policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy", repr(policy), "recompute",
            'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config: a chunk that cannot be read is then '
            "computed again; with vLLM's default the request dies.",
        )  # fmt: skip


def check_vllm(vllm_config: Any) -> None:
    """Refuse vLLM settings under which KV would be wrong or requests would die.

    Raises:
        ConfigError: naming the first such setting.
    """
    transfer = vllm_config.kv_transfer_config
    check_failure_policy(transfer)
    if (getattr(transfer, "kv_connector_extra_config", None) or {}).get("use_native"):
        raise ConfigError(
            "use_native", "true in kv_connector_extra_config", "false with lmcache_nvme_backend",
            "vLLM's own copy of LMCache's adapter does not pass on what keeps LoRA adapters and cache_salts apart.",
        )  # fmt: skip
    if getattr(vllm_config.model_config, "is_multimodal_model", False) and _short_image_hashes():
        raise ConfigError(
            "lmcache", "a release that keeps 16 bits of an image's identity in its keys, with a multimodal model",
            "0.5.5 or later for multimodal models", "Upgrade LMCache: two images could be taken for one.",
        )  # fmt: skip
    check_model(vllm_config)


def check_model(vllm_config: Any) -> None:
    """Refuse what no door can serve: KV that is not a function of weights that stand still and of token ids.

    Raises:
        ConfigError: naming the first such setting.
    """
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "weight_transfer_config", "a configuration", "none with lmcache_nvme_backend",
            "Weights that change while the engine runs would be served the KV of the old ones.",
        )  # fmt: skip
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise ConfigError(
            "--enable-prompt-embeds", "true", "false with lmcache_nvme_backend",
            "Chunks are found by token ids, and embedded prompts have none. Start without it.",
        )  # fmt: skip
