"""The ways into the chunk store: what each needs on vLLM's command line."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from lmcache_nvme_backend.errors import ConfigError

MODULE: Final = "lmcache_nvme_backend"
CHUNK_TOKENS: Final = 256
Door = Literal["plugin", "native", "tier", "mp"]
DOORS: Final[tuple[Door, ...]] = get_args(Door)


def known_door(name: str) -> Door:
    """Raises `ConfigError` where there is no such door."""
    for door in DOORS:
        if door == name:
            return door
    raise ConfigError("--door", repr(name), ", ".join(DOORS), "Take one of these.")


# vLLM's default policy ends a request whose load failed; recompute is what makes a miss harmless.
_COMMON: Final = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
# LMCache's storage plugin, in the engine's process. Its settings are in LMCache's own configuration.
PLUGIN_TRANSFER: Final[dict[str, Any]] = {"kv_connector": "LMCacheConnectorV1", **_COMMON}


def native_transfer(root: str, quota_gib: float, *, mixed: bool, **settings: Any) -> dict[str, Any]:
    """--kv-transfer-config of NvmeOffloadingSpec: vLLM's own offloading, straight to NVMe. vLLM 0.30 or later.

    `mixed`: the model's layers are of several sorts (states, sliding windows).
    """
    return {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_connector_module_path": MODULE,
        **_COMMON,
        "kv_connector_extra_config": {
            "spec_name": "NvmeOffloadingSpec",
            "spec_module_path": MODULE,
            **_chunk(mixed),
            "root_dir": root,
            "quota_gib": quota_gib,
            **settings,
        },
    }


def tier_transfer(
    root: str, quota_gib: float, host_bytes: int, *, mixed: bool, on_cpu: bool = False, **settings: Any
) -> dict[str, Any]:
    """--kv-transfer-config of NvmeTier: behind vLLM's own tiering, whose host tier of `host_bytes` is in front.

    `on_cpu`: vLLM's own worker for the host tier refuses a CPU; this project has one for it.
    """
    spec = {"spec_name": "TieringOffloadingSpec"}
    if on_cpu:
        spec = {"spec_name": "CpuTieringOffloadingSpec", "spec_module_path": MODULE}
    tier = {"type": "NvmeTier", "module_path": MODULE, "root_dir": root, "quota_gib": quota_gib, **settings}
    return {
        "kv_connector": "OffloadingConnector",
        **_COMMON,
        "kv_connector_extra_config": {
            **spec,
            **_chunk(mixed),
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [tier],
        },
    }


def _chunk(mixed: bool) -> dict[str, int]:
    """How much is stored as one. Blocks of several sorts differ in size: one each, since `block_size` asserts on
    those."""
    return {"blocks_per_chunk": 1} if mixed else {"block_size": CHUNK_TOKENS}
