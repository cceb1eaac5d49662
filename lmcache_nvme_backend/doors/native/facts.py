"""What shapes the bytes of a rank's blocks as vLLM keeps them, and what names them.

The scheduler's side and rank 0 must come to the same facts in different processes, so nothing here is read from
tensors; a worker checks the size of what it loads besides.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from lmcache_nvme_backend.doors.native.settings import HF_CONFIG
from lmcache_nvme_backend.doors.packing import block_facts
from lmcache_nvme_backend.doors.vllm_facts import Fact, model_identity, model_name, vllm_facts
from lmcache_nvme_backend.settings import NvmeSettings
from lmcache_nvme_backend.store import Namespace


def namespace(settings: NvmeSettings, config: Any, vllm_config: Any, kv_cache_config: Any) -> Namespace:
    """The namespace of this rank. Raises `ConfigError` where the model's identity cannot be found out.

    Args:
        config: vLLM's `OffloadingConfig`.
    """
    import vllm

    facts: dict[str, Fact] = {
        **vllm_facts(vllm_config),
        "model": model_identity(settings, config.model.name, vllm_config),
        # Blocks are copied as they are, so whatever release and device make of them is part of the bytes.
        "layout": "vllm-blocks",
        "vllm": str(vllm.__version__),
        **block_facts(vllm_config),
        "kv_layout": config.kv_cache_layout,
        "groups": [_group(group, kv_cache_config) for group in config.groups],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "hash_tokens": config.cache.tokens_per_hash,
        # Keys of another algorithm or seed never meet; as facts they tell a person why nothing is found.
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "world_size": config.parallel.world_size,
        "rank": config.parallel.rank,
    }
    if noted := config.extra_config.get(HF_CONFIG):  # as it was before any process built the model
        facts["hf_config"] = str(noted)
    return Namespace(facts, {"model_name": model_name(config.model.name, vllm_config)})


def _group(group: Any, kv_cache_config: Any) -> list[Fact]:
    spec = first_spec(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec)
    fields = sorted(
        f"{field.name}={_name(value)}"
        for field in dataclasses.fields(spec)
        if (value := getattr(spec, field.name)) is not None
    )
    return [group.group_id, group.tokens_per_block, type(spec).__name__, fields, list(group.layer_names)]


def first_spec(spec: Any) -> Any:
    """The specification of a group's first layer: vLLM's scheduler knows no more of layers that differ in size."""
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def _name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value)).removeprefix("torch.")


def random_seed_warning(vllm_config: Any) -> str | None:
    """One sentence where every process names the same prompt differently, so that a restart finds nothing."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("sha256") or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return None
    return (
        f"PYTHONHASHSEED is not set and --prefix-caching-hash-algo is {algorithm}: vLLM names blocks differently in "
        "every process, so nothing stored now will be found after a restart. Set PYTHONHASHSEED=0, or use sha256."
    )
