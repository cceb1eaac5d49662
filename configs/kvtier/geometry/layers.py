"""Which layers of a model keep what: KV for every token, KV for a window, or a state of fixed size."""

from __future__ import annotations

from typing import Any

import msgspec

# The names that config.json files give to a layer, by what the layer keeps.
_FULL = {"full_attention", "attention", "global_attention", "hybrid", "*"}
_WINDOW = {"sliding_attention", "chunked_attention", "local_attention"}
_STATE = {"linear_attention", "mamba", "mamba2", "recurrent", "gated_deltanet", "kda", "conv", "M"}
_STATE_ONLY_MODELS = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7"}


class Layers(msgspec.Struct, frozen=True):
    """How many layers of each sort, and the window of the sliding ones in tokens."""

    full: int
    window: int = 0
    state: int = 0
    window_tokens: int | None = None


def count(config: dict[str, Any]) -> Layers:
    """Count the layers of a text configuration (the ``text_config`` of a multimodal one)."""
    total = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    if config.get("model_type") in _STATE_ONLY_MODELS:
        return Layers(full=0, state=total)
    kinds = _kinds(config, total)
    window_tokens = config.get("sliding_window") or config.get("attention_chunk_size")
    full = sum(kind in _FULL for kind in kinds)
    window = sum(kind in _WINDOW for kind in kinds)
    return Layers(
        full, window, sum(kind in _STATE for kind in kinds), int(window_tokens) if window and window_tokens else None
    )


def _kinds(config: dict[str, Any], total: int) -> list[str]:
    named = config.get("layer_types") or config.get("layers_block_type")
    if named:
        return list(named)
    if pattern := config.get("hybrid_override_pattern"):
        return list(pattern)
    if every := config.get("full_attention_interval"):
        return ["linear_attention" if (index + 1) % every else "full_attention" for index in range(total)]
    if period := config.get("attn_layer_period"):
        offset = int(config.get("attn_layer_offset") or 0)
        return ["attention" if index % period == offset else "mamba" for index in range(total)]
    if "linear_num_value_heads" in config:  # Qwen3-Next and its successors: every fourth layer attends unless said
        return ["full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(total)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        every = config.get("sliding_window_pattern")
        if every:
            return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(total)]
        return ["sliding_attention"] * total
    return ["full_attention"] * total
