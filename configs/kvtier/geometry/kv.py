"""KV bytes a token, from a model's config.json."""

from __future__ import annotations

from typing import Any

import msgspec

from kvtier.geometry.checkpoint import Checkpoint
from kvtier.geometry.layers import Layers, count
from lmcache_nvme_backend.errors import ConfigError

_MODEL_DTYPES = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
"""Bytes of a value in the dtypes that a config.json names, which `auto` follows."""
_KV_DTYPES = {
    "float16": (2.0, 0),
    "bfloat16": (2.0, 0),
    "fp8": (1.0, 0),
    "fp8_e4m3": (1.0, 0),
    "fp8_e5m2": (1.0, 0),
    "fp8_inc": (1.0, 0),
    "turboquant_k8v4": (0.75, 4),
    "turboquant_4bit_nc": (0.5, 6),
    "turboquant_k3v4_nc": (0.4375, 6),
    "turboquant_3bit_nc": (0.375, 6),
    "ultraquant_4bit": (0.5, 6),
    "int4_per_token_head": (0.5, 8),
    "int8_per_token_head": (1.0, 8),
    "fp8_per_token_head": (1.0, 8),
    "nvfp4": (0.5625, 0),
    "nvfp4_4over6": (0.5625, 0),
}
"""vLLM 0.32's CacheDType without `auto` and the MLA layouts: bytes of a value (K and V averaged), and bytes of scales
and norms that one head adds to one token's K and V."""
_MLA_DTYPES = {
    "fp8_ds_mla": lambda rank, rope: rank + rank // 128 * 4 + rope * 2,
    "nvfp4_ds_mla": lambda rank, rope: rank // 2 + rank // 16 + rope,
}
"""Layouts of latent attention: bytes of one token in one layer, from latent rank and rope width (656 and 352 for 512
and 64)."""
KV_CACHE_DTYPES = ("auto", *_KV_DTYPES, *_MLA_DTYPES)


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What a model keeps for each token. Byte counts are over all layers and all tensor-parallel ranks."""

    model: str
    model_type: str
    attention: str
    """``MHA``, ``GQA``, ``MLA`` or ``none``."""
    layers: Layers
    dtype: str
    bytes_per_token: int
    """Layers that keep KV for every token, draft layers left out. 0 where there is no attention. Sliding layers count
    in full: a write-through tier keeps every block."""
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
    def mixed(self) -> bool:
        """Layers of several sorts, whose blocks differ in size."""
        return sum(count > 0 for count in (self.layers.full, self.layers.window, self.layers.state)) > 1

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
        ConfigError: the configuration lacks a field that the formula needs or holds something else than a number
            there, no layer can be counted, or the KV dtype is unknown.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            "--kv-cache-dtype", repr(kv_cache_dtype), ", ".join(KV_CACHE_DTYPES), "Take one of these, or auto."
        )
    try:
        return _read(checkpoint, kv_cache_dtype, tensor_parallel)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise _unusable(checkpoint, f"a field of another kind than its name says ({error})") from error


def _read(checkpoint: Checkpoint, kv_cache_dtype: str, tensor_parallel: int) -> Geometry:
    outer = checkpoint.config
    config: dict[str, Any] = outer.get("text_config") or outer
    _numbers(config, checkpoint)
    layers = count(config)
    if layers.full + layers.window + layers.state == 0:
        raise _unusable(checkpoint, "no layer that could be counted")
    width, extra, label = _dtype(kv_cache_dtype, config, outer)
    attending = layers.full + layers.window
    draft_layers = int(config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0)
    one_layer, attention, words = (
        _one_layer(config, width, extra, label, tensor_parallel, checkpoint) if attending else (0, "none", "")
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
        draft_layers=draft_layers,
        draft_bytes_per_token=one_layer,
        state_bytes=layers.state * _state_of_one_layer(config),
        max_tokens=_whole(config.get("max_position_embeddings")),
        formula=formula,
    )


def _one_layer(
    config: dict[str, Any], width: float, extra: int, label: str, ranks: int, checkpoint: Checkpoint
) -> tuple[int, str, str]:
    """Bytes of a token in one layer, the attention's sort, and the formula in words."""
    if rank := config.get("kv_lora_rank"):
        rope = int(_need(config, "qk_rope_head_dim", checkpoint))
        if label in _MLA_DTYPES:
            size = _MLA_DTYPES[label](int(rank), rope)
            return size, "MLA", f"{size} B ({rank} latent, {rope} rope as {label})"
        return int((rank + rope) * width), "MLA", f"({rank} latent + {rope} rope) x {width:g} B"
    if label in _MLA_DTYPES:
        raise ConfigError(
            "--kv-cache-dtype", repr(label), "a dtype for K and V", "This layout is for latent attention (MLA) alone."
        )
    heads = int(_need(config, "num_attention_heads", checkpoint))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or int(_need(config, "hidden_size", checkpoint)) // heads)
    kept = max(kv_heads, ranks)
    return (
        int(kept * (2 * head_width * width + extra)),
        "MHA" if kv_heads == heads else "GQA",
        f"2 x {kept} KV heads x {head_width} x {width:g} B"
        if not extra
        else f"{kept} KV heads x (2 x {head_width} x {width:g} + {extra} of scales) B",
    )


def _dtype(asked: str, config: dict[str, Any], outer: dict[str, Any]) -> tuple[float, int, str]:
    """Bytes of a value, bytes a head adds to a token, and the dtype's name."""
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
    if name in _MLA_DTYPES:
        return 0.0, 0, name
    if name in _KV_DTYPES:
        return *_KV_DTYPES[name], name
    if name in _MODEL_DTYPES:
        return _MODEL_DTYPES[name], 0, name
    raise ConfigError(
        "MODEL", f"dtype {name!r} in its config.json", ", ".join(_MODEL_DTYPES), "Say --kv-cache-dtype bfloat16 or fp8."
    )


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


_POSITIVE = (
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "max_position_embeddings",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
"""Fields that are whole numbers above 0 where a configuration has them (null is as good as absent)."""
_OFF_AT_ZERO = ("kv_lora_rank", "qk_rope_head_dim")
"""Some models switch latent attention, or the rotary part of it, off so."""


def _numbers(config: dict[str, Any], checkpoint: Checkpoint) -> None:
    for name in _POSITIVE:
        value = config.get(name)
        if value is None or (value == 0 and name in _OFF_AT_ZERO):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value <= 0:
            raise _unusable(checkpoint, f"{name}: {value!r}")


def _unusable(checkpoint: Checkpoint, found: str) -> ConfigError:
    return ConfigError(
        "MODEL",
        f"{checkpoint.directory / 'config.json'} with {found}",
        "a decoder's configuration, with numbers above 0 for its layers, heads and widths",
        "Download the file again, or give the language model's own config.json.",
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
