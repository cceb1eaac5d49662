"""How vLLM's CPU attention packs a block: a fact of every namespace that holds its blocks as they are."""

from __future__ import annotations

from typing import Any


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
