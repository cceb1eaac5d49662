"""What makes two runs' chunks interchangeable: the namespace of a rank, in words.

LMCache's own keys name a model path, ranks and a dtype. Everything else that shapes the bytes is put into the
namespace here, so that a changed model, layout, hash seed or engine never finds the chunks of another.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.fingerprint import identify_model
from lmcache_nvme_backend.settings import NvmeSettings

Fact = str | int | bool | None | list[Any]


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
        "model": _model_identity(settings, metadata, vllm_config),
        "kv_dtype": str(metadata.kv_dtype).removeprefix("torch."),
        "kv_shape": [layers, kv_size, heads, head_size],
        "chunk_tokens": chunk_tokens,
        "save_unfull_chunk": bool(config.save_unfull_chunk),
        "world_size": metadata.world_size,
        "rank": metadata.worker_id,
        **_hash_facts(config),
        **(_vllm_facts(vllm_config) if vllm_config is not None else {"engine": "none"}),
    }


def model_name(metadata: Any, vllm_config: Any | None) -> str:
    """What the engine calls the model, a path as the whole path: no part of the namespace, but it tells which of two
    namespaces holds the KV of weights that have been replaced."""
    name = str(getattr(getattr(vllm_config, "model_config", None), "model", None) or metadata.model_name)
    try:
        return str(Path(name).absolute()) if Path(name).exists() else name
    except (OSError, ValueError):
        return name


def _model_identity(settings: NvmeSettings, metadata: Any, vllm_config: Any | None) -> str:
    if settings.model_fingerprint:
        return f"given:{settings.model_fingerprint}"
    model_config = getattr(vllm_config, "model_config", None)
    name = getattr(model_config, "model", None) or metadata.model_name
    try:
        identity = identify_model(name, getattr(model_config, "revision", None))
    except (ValueError, OSError) as e:
        raise ConfigError(
            "nvme.model_fingerprint", f"nothing, and the weights of {name!r} cannot be identified ({e})",
            "a text that changes whenever the weights change", "Set it to a name for these weights.",
        ) from e  # fmt: skip
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto"))
    # Dummy weights come from the seed, not from the files.
    return f"{identity}+dummy:{getattr(model_config, 'seed', None)}" if load_format.endswith("dummy") else identity


def _vllm_facts(vllm_config: Any) -> dict[str, Fact]:
    """Facts that only vLLM knows, read tolerantly: a release may lack one, and its absence is a fact too."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hf_config": _digest_config(model.hf_config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": [
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "prefill_context_parallel_size", 1),
        ],
        "layers": _layer_range(model, parallel),
        "draft_model": _draft_identity(vllm_config),
        **_layout_facts(vllm_config),
    }
    return facts


def _layer_range(model: Any, parallel: Any) -> list[Any] | None:
    """Which of the model's layers this pipeline stage has: two partitions can give a rank as many, but others."""
    try:
        return list(model.get_layers_start_end_indices(parallel))
    except AttributeError:
        return None


def _draft_identity(vllm_config: Any) -> str | None:
    """The draft layers' KV lies in the same chunks, so another draft model is another namespace."""
    spec = getattr(vllm_config, "speculative_config", None)
    if spec is None:
        return None
    name, target = getattr(spec, "model", None), vllm_config.model_config.model
    if not name or name == target:
        return str(spec.method)
    try:
        return f"{spec.method}:{identify_model(name, getattr(spec, 'revision', None))}"
    except (ValueError, OSError):
        return f"{spec.method}:{name}"


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

    from lmcache_nvme_backend.doors.cpu_connector import block_packing

    return {
        "layout": "vllm-cpu-blocks",
        "device": device,
        "block_tokens": cache.block_size,
        "packing": block_packing(vllm_config),
        "vllm": str(vllm.__version__),
    }


def _digest_config(hf_config: Any) -> str:
    """The model configuration as the engine uses it, overrides included, without where it was read from."""
    fields = hf_config.to_dict() if hasattr(hf_config, "to_dict") else dict(vars(hf_config))
    text = msgspec.json.encode(_plain(fields), order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in ("_name_or_path", "transformers_version")}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


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
