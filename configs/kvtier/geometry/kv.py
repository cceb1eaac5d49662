"""KV bytes a token, from a model's config.json."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.geometry.checkpoint import Checkpoint
from kvtier.geometry.layers import Layers, count
from kvtier.units import MIB
from lmcache_nvme_backend.errors import ConfigError

_BYTES = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "auto": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "int8": 1.0,
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
}


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps for each token. Byte counts are over all layers and all tensor-parallel ranks."""

    model: str
    model_type: str
    attention: str
    """``MHA``, ``GQA``, ``MLA`` or ``none``."""
    layers: Layers
    dtype: str
    bytes_per_token: int
    """Layers that keep KV for every token, draft layers left out. 0 where there is no attention."""
    window_bytes_per_token: int
    """The sliding layers' part, which is in `bytes_per_token` too: a write-through tier keeps every block."""
    draft_layers: int
    """MTP layers the checkpoint brings."""
    draft_bytes_per_token: int
    """KV of one token in one draft layer."""
    state_bytes: int
    """State of one sequence over all layers without KV; 0 where the model has none."""
    max_tokens: int | None
    """The context length that the configuration allows."""
    formula: str
    """The calculation in words and numbers, for a person."""

    @property
    def hybrid(self) -> bool:
        """Attention layers beside layers that keep a state."""
        return self.layers.state > 0 and self.layers.full + self.layers.window > 0

    @property
    def attention_free(self) -> bool:
        """No layer keeps KV for a token."""
        return self.layers.full + self.layers.window == 0

    @property
    def windowed(self) -> bool:
        """Sliding layers beside full ones (or alone)."""
        return self.layers.window > 0


def read(checkpoint: Checkpoint, *, kv_cache_dtype: str = "auto", tensor_parallel: int = 1) -> Geometry:
    """KV geometry of a checkpoint.

    For grouped-query attention: layers x 2 (K and V) x KV heads x head width x bytes, KV heads being at least
    `tensor_parallel` because vLLM replicates heads that it cannot split. For multi-head latent attention: layers x
    (latent rank + rope width) x bytes, one copy whatever the parallelism. Layers with a state of fixed size (GDN,
    Mamba) count nothing per token.

    Raises:
        ConfigError: the configuration lacks a field that the formula needs, or the KV dtype is unknown.
    """
    outer = checkpoint.config
    config: dict[str, Any] = outer.get("text_config") or outer
    layers = count(config)
    width, label = _dtype(kv_cache_dtype, config, outer)
    attending = layers.full + layers.window
    draft_layers = int(config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0)
    one_layer, attention, words = (
        _one_layer(config, width, tensor_parallel, checkpoint) if attending else (0, "none", "")
    )
    formula = f"{attending} layers x {words} = {attending * one_layer:,} B" if attending else "no attention layer: 0 B"
    if layers.state and attending:
        formula += f" ({layers.state} layers with a state of fixed size count nothing)"
    return Geometry(
        model=checkpoint.name,
        model_type=str(config.get("model_type") or outer.get("model_type") or "unknown"),
        attention=attention,
        layers=layers,
        dtype=label,
        bytes_per_token=attending * one_layer,
        window_bytes_per_token=layers.window * one_layer,
        draft_layers=draft_layers,
        draft_bytes_per_token=one_layer,
        state_bytes=layers.state * _state_of_one_layer(config),
        max_tokens=_whole(config.get("max_position_embeddings")),
        formula=formula,
    )


def _one_layer(config: dict[str, Any], width: float, ranks: int, checkpoint: Checkpoint) -> tuple[int, str, str]:
    """Bytes of a token in one layer, the attention's sort, and the formula in words."""
    if rank := config.get("kv_lora_rank"):
        rope = int(_need(config, "qk_rope_head_dim", checkpoint))
        return int((rank + rope) * width), "MLA", f"({rank} latent + {rope} rope) x {width:g} B"
    heads = int(_need(config, "num_attention_heads", checkpoint))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or int(_need(config, "hidden_size", checkpoint)) // heads)
    kept = max(kv_heads, ranks)
    return (
        int(2 * kept * head_width * width),
        "MHA" if kv_heads == heads else "GQA",
        (f"2 x {kept} KV heads x {head_width} x {width:g} B"),
    )


def _dtype(asked: str, config: dict[str, Any], outer: dict[str, Any]) -> tuple[float, str]:
    name = asked
    if asked == "auto":
        scheme = (outer.get("quantization_config") or {}).get("kv_cache_scheme") or {}
        own = str(
            config.get("dtype")
            or config.get("torch_dtype")
            or outer.get("dtype")
            or outer.get("torch_dtype")
            or "bfloat16"
        ).removeprefix("torch.")
        name = "fp8" if scheme.get("num_bits") == 8 else own
    if name not in _BYTES:
        raise ConfigError("--kv-cache-dtype", repr(name), ", ".join(sorted(_BYTES)), "Take one of these, or auto.")
    return _BYTES[name], name


def _state_of_one_layer(config: dict[str, Any]) -> int:
    """State of one sequence in one GDN or Mamba layer: the convolution's tail and the recurrent matrix.

    The shapes are those of the published reference implementations: GDN keeps value heads x key width x value width
    and (kernel - 1) x (2 x keys + values); Mamba keeps intermediate width x state width and (kernel - 1 or kernel) x
    intermediate width. Convolution tails are taken at two bytes, the recurrent part at what the configuration says.
    """
    recurrent_bytes = 4 if "32" in str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")) else 2
    if value_heads := config.get("linear_num_value_heads"):
        key_width, value_width = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        channels = 2 * int(config["linear_num_key_heads"]) * key_width + int(value_heads) * value_width
        tail = (int(config.get("linear_conv_kernel_dim") or 4) - 1) * channels * 2
        return tail + int(value_heads) * key_width * value_width * recurrent_bytes
    inner = config.get("intermediate_size") or int(config.get("expand") or 2) * int(config.get("hidden_size") or 0)
    return int(inner) * (
        int(config.get("conv_kernel") or 4) * 2 + int(config.get("state_size") or 16) * recurrent_bytes
    )


def _need(config: dict[str, Any], key: str, checkpoint: Checkpoint) -> Any:
    if config.get(key) is None:
        raise ConfigError(
            "MODEL",
            f"{checkpoint.directory / 'config.json'} without {key!r}",
            "a decoder's configuration",
            "Give the language model's own config.json.",
        )
    return config[key]


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value > 0 else None


def describe_state(geometry: Geometry) -> str:
    """The state of one sequence in words, or an empty string."""
    return f"{geometry.state_bytes / MIB:.1f} MiB of state a sequence" if geometry.state_bytes else ""
