"""How a device and its attention lay out the inside of a block: facts of every namespace that holds vLLM's blocks as
they are."""

from __future__ import annotations

from typing import Any


def block_facts(vllm_config: Any) -> dict[str, str | None]:
    """What vLLM's own layout and sizes leave open."""
    from vllm.platforms import current_platform

    device = str(vllm_config.device_config.device_type)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return {
        "device": device,
        "device_name": "cpu" if device == "cpu" else str(current_platform.get_device_name()),
        "packing": block_packing(vllm_config) if device == "cpu" else None,
        "attention_backend": None if backend is None else str(getattr(backend, "name", backend)),
    }


def block_packing(vllm_config: Any) -> str:
    """vLLM's name for how its CPU attention packs a block here (amx, vec, neon, …)."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return "unknown"
    model, cache = vllm_config.model_config, vllm_config.cache_config
    arguments: list[Any] = [model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype]
    accepted = _get_attn_isa.__code__.co_argcount
    return str(_get_attn_isa(*arguments[:accepted]))
