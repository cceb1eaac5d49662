"""KV bytes a token, from the configurations of the model matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.geometry import checkpoint, kv
from kvtier.geometry.kv import Geometry
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import model


def read(name: str, dtype: str = "auto", ranks: int = 1) -> Geometry:
    return kv.read(checkpoint.find(model(name)), kv_cache_dtype=dtype, tensor_parallel=ranks)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("llama-dense", "auto", 32 * 2 * 32 * 128 * 2),
        ("qwen3-gqa", "auto", 64 * 2 * 8 * 128 * 2),
        ("qwen3-gqa", "fp8", 64 * 2 * 8 * 128),
        ("deepseek-mla", "auto", 27 * (512 + 64) * 2),
        ("qwen3_5-hybrid", "fp8", 16 * 2 * 4 * 256),
        ("gpt-oss-swa", "auto", 24 * 2 * 8 * 64 * 2),
        ("mamba", "auto", 0),
    ],
)
def test_bytes_per_token(name: str, dtype: str, expected: int) -> None:
    """Dense, grouped, latent, hybrid (full-attention layers only), sliding and attention-free models."""
    assert read(name, dtype).bytes_per_token == expected


def test_sorts_of_models() -> None:
    """Hybrid is attention beside a state; sliding layers alone are not hybrid; Mamba has no attention."""
    assert [
        name
        for name in ("llama-dense", "qwen3_5-hybrid", "qwen3_5-hybrid-mtp", "gpt-oss-swa", "mamba")
        if read(name).hybrid
    ] == ["qwen3_5-hybrid", "qwen3_5-hybrid-mtp"]
    assert read("gpt-oss-swa").windowed and read("gpt-oss-swa").layers.window_tokens == 128
    assert read("mamba").attention_free
    assert (read("qwen3_5-hybrid").draft_layers, read("qwen3_5-hybrid-mtp").draft_layers) == (0, 1)
    assert [read(name).attention for name in ("llama-dense", "qwen3-gqa", "deepseek-mla", "mamba")] == [
        "MHA",
        "GQA",
        "MLA",
        "none",
    ]


def test_heads_that_cannot_be_split_are_replicated() -> None:
    """More ranks than KV heads replicate them: the bytes over all ranks grow. Latent attention keeps one copy."""
    assert read("qwen3-gqa", ranks=16).bytes_per_token == 2 * read("qwen3-gqa", ranks=8).bytes_per_token
    assert read("deepseek-mla", ranks=8).bytes_per_token == read("deepseek-mla").bytes_per_token


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4}, (1, 0, 7)),
        ({"model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-"}, (1, 0, 2)),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512, "sliding_window_pattern": 6},
            (2, 10, 0),
        ),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8, "linear_num_value_heads": 4}, (2, 0, 6)),
    ],
)
def test_layer_patterns(config: dict[str, object], layers: tuple[int, int, int]) -> None:
    """The ways in which configurations say which layers attend."""
    from kvtier.geometry.layers import count

    found = count(config)
    assert (found.full, found.window, found.state) == layers


def test_quantised_kv_of_the_checkpoint_counts(tmp_path: Path) -> None:
    """With dtype auto, a checkpoint that declares an 8-bit KV scheme is counted at one byte."""
    config = json.loads(Path(model("qwen3-gqa"), "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv.read(checkpoint.find(str(tmp_path))).bytes_per_token == read("qwen3-gqa", "fp8").bytes_per_token


def test_hub_cache_is_looked_up_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's name finds its snapshot in the local hub cache, and nothing is fetched."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(Path(model("qwen3-gqa"), "config.json").read_bytes())
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert checkpoint.find("org/name").directory == snapshot
    with pytest.raises(ConfigError, match="hub cache"):
        checkpoint.find("org/other")


@pytest.mark.parametrize("missing", ["num_attention_heads", "hidden_size"])
def test_configuration_without_heads_is_an_error(tmp_path: Path, missing: str) -> None:
    """A configuration that lacks what the formula needs is one clear error."""
    config = json.loads(Path(model("llama-dense"), "config.json").read_text())
    del config[missing]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=missing):
        kv.read(checkpoint.find(str(tmp_path)))


def test_unknown_dtype_is_an_error() -> None:
    """An unknown KV dtype names those that are known."""
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        read("llama-dense", "fp5")
