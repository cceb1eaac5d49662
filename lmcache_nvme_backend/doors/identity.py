"""What makes two runs' chunks interchangeable: the namespace of a rank, in words.

LMCache's own keys name a model path, ranks and a dtype. Everything else that shapes the bytes is put into the
namespace here, so that a changed model, layout, hash seed or engine never finds the chunks of another.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from lmcache_nvme_backend.doors.vllm_facts import Fact, model_identity, vllm_facts
from lmcache_nvme_backend.settings import NvmeSettings


def namespace_facts(settings: NvmeSettings, config: Any, metadata: Any, vllm_config: Any | None) -> dict[str, Fact]:
    """Every fact that shapes a chunk's bytes or its key.

    Args:
        config: LMCache's ``LMCacheEngineConfig``.
        metadata: LMCache's ``LMCacheMetadata`` of this rank.
        vllm_config: vLLM's configuration, or ``None`` outside vLLM.

    Raises:
        ConfigError: the model's identity cannot be found out.
    """
    layers, kv_size, chunk_tokens, heads, head_size = metadata.kv_shape
    return {
        "model": model_identity(settings, metadata.model_name, vllm_config),
        "kv_dtype": str(metadata.kv_dtype).removeprefix("torch."),
        "kv_shape": [layers, kv_size, heads, head_size],
        "chunk_tokens": chunk_tokens,
        "save_unfull_chunk": bool(config.save_unfull_chunk),
        "world_size": metadata.world_size,
        "rank": metadata.worker_id,
        **_hash_facts(config),
        **_engine_facts(vllm_config),
    }


def _engine_facts(vllm_config: Any | None) -> dict[str, Fact]:
    return {"engine": "none"} if vllm_config is None else {**vllm_facts(vllm_config), **_layout_facts(vllm_config)}


def _layout_facts(vllm_config: Any) -> dict[str, Fact]:
    """How a chunk's bytes are arranged.

    On an accelerator LMCache's kernels write ``KV_2LTD`` (or MLA's form) whatever the paging is. How well they know the
    paging depends on the release, so release and layout are facts. On a CPU the blocks are copied as they are, so
    vLLM's release, block size and packing are part of the bytes.
    """
    device, cache = str(vllm_config.device_config.device_type), vllm_config.cache_config
    if device != "cpu":
        from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version

        layout = getattr(cache, "get_resolved_kv_cache_layout", None)
        return {
            "layout": "lmcache",
            "device": device,
            "lmcache": lmcache_version(),
            "kv_layout": str(getattr(layout(), "name", "")) if layout is not None else None,
            "block_tokens": cache.block_size,
        }
    import vllm

    from lmcache_nvme_backend.doors.packing import block_packing

    return {
        "layout": "vllm-cpu-blocks",
        "device": device,
        "block_tokens": cache.block_size,
        "packing": block_packing(vllm_config),
        "vllm": str(vllm.__version__),
    }


def _hash_facts(config: Any) -> dict[str, Fact]:
    from lmcache.v1 import token_database

    algorithm = str(config.pre_caching_hash_algorithm)
    facts: dict[str, Fact] = {"hash": algorithm, "none_hash": f"{token_database.NONE_HASH & (1 << 64) - 1:016x}"}
    if algorithm == "builtin":
        facts["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return facts


def random_seed_warning(config: Any) -> str | None:
    """One sentence where this process's hash seed is random, so that a restart finds nothing; else ``None``."""
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return None
    algorithm = str(config.pre_caching_hash_algorithm)
    if algorithm.startswith("sha256"):
        try:
            from vllm.v1.core import kv_cache_utils
        except ImportError:
            return None
        # Releases that have this constant seed cryptographic hashes with it; older ones draw a seed per process.
        if hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
            return None
    return (
        f"PYTHONHASHSEED is not set and the hash algorithm is {algorithm!r}: chunk keys differ in every process, so "
        "nothing stored now will be found after a restart. Set PYTHONHASHSEED=0, or use "
        "pre_caching_hash_algorithm: sha256_cbor."
    )
