"""What a tier opens at its start: the store of its namespace, and the groups of its chunks; or one error that says why
not.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from lmcache_nvme_backend.doors import refusals
from lmcache_nvme_backend.doors.hybrid_prefix import ORDER, CacheGroup, PrefixOrder
from lmcache_nvme_backend.doors.packing import block_facts
from lmcache_nvme_backend.doors.store_opening import open_store
from lmcache_nvme_backend.doors.tier.requests import SCHEDULER, note_requests
from lmcache_nvme_backend.doors.vllm_facts import Fact, model_identity, model_name, vllm_facts
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings, parse_tier_settings, tier_names
from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings, digest_fields
from lmcache_nvme_backend.store.opening import check_root

WHERE: Final = "the NvmeTier entry of secondary_tiers"
# Keys of a tier's dictionary that are vLLM's.
_VLLMS: Final = ("type", "module_path", "locality", "backpressure")
# Settings of doors that have a staging ring.
_UNUSED: Final = ("staging_mib", "store_wait_ms")
OLDEST: Final = (0, 29)
VERSIONS: Final = "versions 0.29 to 0.33"


class Engine(msgspec.Struct, frozen=True):
    """What surrounds the tier, as far as it is known: vLLM's configuration, and that of its KV cache."""

    vllm_config: Any | None
    kv_cache_config: Any | None


def parse(config: Mapping[str, Any]) -> NvmeSettings:
    """The settings in a tier's dictionary. Raises `ConfigError` with the dictionary's names."""
    for name in _UNUSED:
        if name in config:
            raise ConfigError(
                name,
                repr(config[name]),
                "nothing",
                f"Remove it: vLLM's buffer is the staging of {WHERE}.",
            )
    return parse_tier_settings(config, _VLLMS, where=WHERE, staging_mib=1)


def check_entry(config: Mapping[str, Any]) -> None:
    """What can be known of a tier's dictionary without an engine. Raises `ConfigError`."""
    settings = parse(config)
    with tier_names():
        check_root(Path(settings.path), StoreSettings(settings.quota_bytes))


def surrounding_engine() -> Engine:
    """The configuration of the engine that is constructing a tier.

    vLLM passes a tier a digest of its configuration, without the model's revision or the kinds of its layers. Its
    scheduler side, which is what constructs tiers, has all of it, and is on the stack then.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == SCHEDULER and frame.f_code.co_name == "__init__":
            local = frame.f_locals
            return Engine(local.get("vllm_config"), local.get("kv_cache_config"))
        frame = frame.f_back  # type: ignore[assignment]
    return Engine(None, None)


def vllm_version() -> str:
    return str(getattr(import_module("vllm"), "__version__", "unknown"))


def check_version(version: str) -> None:
    """Refuse a vLLM without tiers of this kind. Raises `ConfigError`."""
    numbers = version.split(".")[:2]
    if all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) < OLDEST:
        raise ConfigError(
            "vllm", f"version {version}", VERSIONS,
            "Upgrade vLLM: earlier ones ask a tier in other ways, and serve nothing on hybrid models with MTP.",
        )  # fmt: skip


def cache_groups(config: Any, engine: Engine) -> tuple[CacheGroup, ...]:
    """The groups whose chunks the tier is asked for. Without the engine's word all count as full attention.

    `config` is vLLM's `OffloadingConfig`.
    """
    per_chunk, per_hash = int(config.cache.blocks_per_chunk), int(config.cache.tokens_per_hash)
    window_of = getattr(sys.modules.get(SCHEDULER), "get_sliding_window_size_in_chunks", None)
    groups = []
    for at, group in enumerate(config.groups):
        number, tokens = int(getattr(group, "group_id", at)), int(group.tokens_per_block) * per_chunk
        window = None
        if engine.kv_cache_config is not None and window_of is not None:
            window = window_of(engine.kv_cache_config.kv_cache_groups[number].kv_cache_spec, tokens)
        groups.append(CacheGroup(number, max(1, tokens // per_hash), window))
    return tuple(groups)


def open_tier_store(
    settings: NvmeSettings, spec: Any, engine: Engine, groups: Sequence[CacheGroup], row_bytes: int
) -> ChunkStore:
    """Raises `ConfigError`, with the names of a tier's dictionary."""
    version = vllm_version()
    hybrid = PrefixOrder(groups, digest_fields).hybrid
    with tier_names():
        if engine.vllm_config is not None:
            refusals.check_model(engine.vllm_config)
            note_requests(version)
        if hybrid and settings.admission == "second-sight":
            raise ConfigError(
                "nvme.admission", "second-sight, with a model that has windows or states", "all, auto",
                "Their chunks are kept in the order of their last use, which remembers nothing of what is not here.",
            )  # fmt: skip
        if hybrid:
            settings = msgspec.structs.replace(settings, admission="all")
        namespace = Namespace(
            namespace_facts(settings, spec.config, engine, groups, row_bytes, version),
            {"model_name": model_name(spec.config.model.name, engine.vllm_config)},
        )
        return open_store(
            settings,
            namespace,
            chunk_bytes=row_bytes,
            # A state may be of other numbers than the model's.
            item_sizes={0} if hybrid else {_item_size(str(spec.config.model.dtype))},
            policy=ORDER() if hybrid else None,
        )


def namespace_facts(
    settings: NvmeSettings, config: Any, engine: Engine, groups: Sequence[CacheGroup], row_bytes: int, version: str
) -> dict[str, Fact]:
    """Every fact that shapes a row of vLLM's host buffer, or the hash that names it. A row holds all workers' parts."""
    parallel, vllm_config = config.parallel, engine.vllm_config
    return {
        "door": "vllm-tiering",
        "model": model_identity(settings, str(config.model.name), vllm_config),
        "vllm": version,  # how a row is laid out is vLLM's own affair
        "row_bytes": row_bytes,
        "worker_block_bytes": int(config.worker_kv_bytes_per_block),
        "kv_dtype": str(config.model.dtype),
        "tokens_per_hash": int(config.cache.tokens_per_hash),
        "blocks_per_chunk": int(config.cache.blocks_per_chunk),
        "groups": [
            [
                group.number,
                int(its.tokens_per_block),
                group.window,
                _digest(its.layer_names),
                *_kind(engine, group.number),
            ]
            for group, its in zip(groups, config.groups, strict=True)
        ],
        "kv_layout": getattr(config, "kv_cache_layout", None),
        "canonical_layout": bool(getattr(config, "canonical_layout", False)),
        "replicated_layout": bool(getattr(config, "replicated_layout", False)),
        "workers": [
            int(getattr(parallel, name)) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ],
        **_hash_facts(vllm_config),
        **(vllm_facts(vllm_config) if vllm_config is not None else {"engine": "none"}),
        **(block_facts(vllm_config) if vllm_config is not None else {"device": None}),
    }


def _kind(engine: Engine, number: int) -> list[Fact]:
    """What a group's layers keep, in vLLM's own words."""
    if engine.kv_cache_config is None:
        return []
    spec = engine.kv_cache_config.kv_cache_groups[number].kv_cache_spec
    return [type(spec).__name__, int(spec.page_size_bytes), str(getattr(spec, "dtype", getattr(spec, "dtypes", "")))]


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()


def _hash_facts(vllm_config: Any | None) -> dict[str, Fact]:
    """How block hashes are made. A seed that is drawn for each process makes a namespace of its own."""
    if vllm_config is None:
        return {}
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = "vllm's own" if algorithm.startswith("sha256") else f"drawn by {os.getpid()}: {os.urandom(8).hex()}"
    return {"hash": algorithm, "hash_seed": seed}


def unstable_hash_warning(vllm_config: Any | None) -> str | None:
    """One sentence where block hashes differ in every process, so that a restart finds nothing."""
    if vllm_config is None or os.environ.get("PYTHONHASHSEED") is not None:
        return None
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("sha256"):
        return None
    return (
        f"--prefix-caching-hash-algo is {algorithm} and PYTHONHASHSEED is not set: vLLM draws a seed for each process, "
        "so nothing stored now will be found after a restart. Use sha256 (the default)."
    )


def states_warning(config: Any, engine: Engine) -> str | None:
    """One sentence where hardly any state of a hybrid model is ever whole, so that little or nothing is found.

    `config` is vLLM's `OffloadingConfig`.
    """
    groups = engine.kv_cache_config.kv_cache_groups if engine.kv_cache_config is not None else ()
    states = any(getattr(group.kv_cache_spec, "mamba_cache_mode", "all") != "all" for group in groups)
    if not states or int(config.cache.blocks_per_chunk) == 1:
        return None
    return (
        f"blocks_per_chunk is {config.cache.blocks_per_chunk} and the model keeps states, of which vLLM has few: what "
        "is stored may never be found. Set blocks_per_chunk to 1 beside cpu_bytes_to_use."
    )


def _item_size(dtype: str) -> int:
    """Bytes of one number; 0 where that is not known by its name."""
    if "8" in dtype and "bfloat" not in dtype:
        return 1
    return 2 if "16" in dtype else 4 if "32" in dtype else 0
