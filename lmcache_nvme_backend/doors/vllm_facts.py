"""What vLLM's configuration says of a model and of its KV, for the namespaces of every door."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.fingerprint import identify_model
from lmcache_nvme_backend.settings import NvmeSettings

Fact = str | int | bool | None | list[Any]

# Positions that these encode otherwise where --max-model-len is longer (vLLM's Phi3LongRoPEScaledRotaryEmbedding takes
# the long factors for the first token already), or whose table may end with it.
_ROPE_BY_LENGTH: Final = ("longrope", "su", "dynamic")
# Scales its queries from a --max-model-len of 32,768 on, which all layers behind the first see.
_MODELS_BY_LENGTH: Final = ("llama4",)


def model_name(fallback: str, vllm_config: Any | None) -> str:
    """What the engine calls the model, a path as the whole path: no part of the namespace, but it tells which of two
    namespaces holds the KV of weights that have been replaced."""
    name = str(getattr(getattr(vllm_config, "model_config", None), "model", None) or fallback)
    try:
        return str(Path(name).absolute()) if Path(name).exists() else name
    except (OSError, ValueError):
        return name


def model_identity(settings: NvmeSettings, fallback: str, vllm_config: Any | None) -> str:
    """The weights' identity: `settings.model_fingerprint` where given, else a fingerprint of the weights themselves.

    `fallback` names the model where there is no vLLM configuration. Raises `ConfigError` where it cannot be found out.
    """
    if settings.model_fingerprint:
        return f"given:{settings.model_fingerprint}"
    model_config = getattr(vllm_config, "model_config", None)
    name = getattr(model_config, "model", None) or fallback
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


def vllm_facts(vllm_config: Any) -> dict[str, Fact]:
    """Facts that only vLLM knows, read tolerantly: a release may lack one, and its absence is a fact too.

    How the bytes of a chunk are arranged is the door's to add.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "engine": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hf_config": digest_config(model.hf_config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": [
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "prefill_context_parallel_size", 1),
        ],
        "layers": _layer_range(model, parallel),
        "draft_model": _draft_identity(vllm_config),
        **({"max_model_len": model.max_model_len} if _depends_on_length(_fields(model.hf_config)) else {}),
        **_facts_set(vllm_config),
    }


def _facts_set(vllm_config: Any) -> dict[str, Fact]:
    """What else shapes KV, where it is set: left at vLLM's defaults it is no fact."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    media, attention = getattr(model, "multimodal_config", None), getattr(vllm_config, "attention_config", None)
    lora = getattr(vllm_config, "lora_config", None)
    settings = (
        # How tokens are spread over the ranks of a context.
        (parallel, "cp_kv_cache_interleave_size", 1),
        (attention, "backend_per_kind", None),
        (attention, "indexer_kv_dtype", "auto"),
        (cache, "kv_cache_dtype_skip_layers", None),
        (cache, "use_replayssm", False),
        (model, "quantization_config", None),
        (model, "model_impl", "auto"),
        (lora, "target_modules", None),
        # vLLM's hash of an image holds what its request says of it, and not what the server was told.
        (media, "mm_processor_kwargs", None),
        (media, "media_io_kwargs", None),
        (media, "video_pruning_rate", None),
        (media, "mm_device_do_normalize", False),
    )
    found = {name: getattr(config, name, default) for config, name, default in settings}
    return {
        name: msgspec.json.encode(_plain(found[name]), order="deterministic").decode()
        for _, name, default in settings
        if found[name] and found[name] != default
    }


def _depends_on_length(config: Any) -> bool:
    """Whether a model's KV for given tokens changes with the longest context that it is started for."""
    if isinstance(config, Mapping):
        rope = config.get("rope_type", config.get("type"))
        by_model = str(config.get("model_type", "")).startswith(_MODELS_BY_LENGTH)
        return by_model or rope in _ROPE_BY_LENGTH or any(map(_depends_on_length, config.values()))
    return isinstance(config, list | tuple) and any(map(_depends_on_length, config))


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


def digest_config(hf_config: Any) -> str:
    """The model configuration as the engine uses it, overrides included, without where it was read from."""
    text = msgspec.json.encode(_plain(_fields(hf_config)), order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _fields(hf_config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = hf_config.to_dict() if hasattr(hf_config, "to_dict") else dict(vars(hf_config))
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in ("_name_or_path", "transformers_version")}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
