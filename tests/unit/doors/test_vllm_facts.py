"""What of vLLM's configuration shapes KV. What needs a real one is tried in tests/integration/test_identity.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_nvme_backend.doors.vllm_facts import vllm_facts

LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}


def facts(hf_config: dict[str, Any], max_model_len: int = 4096, **cache_settings: Any) -> dict[str, Any]:
    model = SimpleNamespace(
        dtype="torch.bfloat16", quantization=None, model="m", max_model_len=max_model_len,
        hf_config=SimpleNamespace(**hf_config),
    )  # fmt: skip
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    cache = SimpleNamespace(cache_dtype="auto", **cache_settings)
    return vllm_facts(SimpleNamespace(model_config=model, cache_config=cache, parallel_config=parallel))


@pytest.mark.parametrize(
    "hf_config",
    [
        LONGROPE,
        {"rope_scaling": {"type": "su"}},
        {"text_config": LONGROPE},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        {"model_type": "llama4"},
        {"text_config": {"model_type": "llama4_text"}},
    ],
)
def test_max_model_len_tells_runs_apart_where_it_changes_kv(hf_config: dict[str, Any]) -> None:
    """Phi's positions and Llama 4's queries are scaled by it, from the first token on."""
    assert facts(hf_config, 4096) == facts(hf_config, 4096)
    assert facts(hf_config, 4096) != facts(hf_config, 131072)


@pytest.mark.parametrize("hf_config", [{"model_type": "llama"}, {"rope_parameters": {"rope_type": "yarn"}}])
def test_max_model_len_leaves_other_models_chunks_alone(hf_config: dict[str, Any]) -> None:
    """A longer context is no reason for a cold cache."""
    assert facts(hf_config, 4096) == facts(hf_config, 131072)


def test_layers_that_stay_unquantized_tell_runs_apart() -> None:
    """Other ones, as many, make chunks of the same size and of another meaning."""
    one, other = (facts({}, kv_cache_dtype_skip_layers=[layer]) for layer in "01")
    assert one != other != facts({})
    assert facts({}, kv_cache_dtype_skip_layers=[]) == facts({})
