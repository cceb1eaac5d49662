"""KV is never shared between runs of which any fact that shapes it differs: real LMCache, real vLLM configurations."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from lmcache.integration.vllm.utils import create_lmcache_metadata
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)

from lmcache_nvme_backend.doors import vllm_plugin
from lmcache_nvme_backend.doors.identity import namespace_facts
from lmcache_nvme_backend.doors.scope import BASE, TAG_FIELD, scope_of
from lmcache_nvme_backend.doors.vllm_facts import vllm_facts
from lmcache_nvme_backend.settings import parse_settings
from lmcache_nvme_backend.store import Namespace

from .conftest import CHUNK, PagedKv, lmcache_metadata, prompt

TOKENS = 2 * CHUNK
MARK = {TAG_FIELD: BASE}
CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 30000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


class Run:
    """What one start of an engine is told; a change is one of these set otherwise."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.dtype, self.kv_dtype, self.cache_dtype = "bfloat16", torch.bfloat16, "auto"
        self.tp, self.pp, self.rank, self.block = 2, 1, 0, 32
        self.seed: str | None = "0"
        self.mark: dict[str, str] | None = MARK
        self.fingerprint: str | None = None
        self.speculation: dict[str, Any] | None = None
        self.write_weights(b"first weights")
        self.write_configuration({})

    def write_weights(self, data: bytes) -> None:
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        (self.model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)

    def write_configuration(self, changes: dict[str, Any]) -> None:
        (self.model / "config.json").write_text(json.dumps(CONFIGURATION | changes))

    def vllm_config(self, **parallelism: Any) -> VllmConfig:
        parallel = ParallelConfig(tensor_parallel_size=self.tp, pipeline_parallel_size=self.pp, **parallelism)
        model = ModelConfig(
            model=str(self.model), tokenizer=str(self.model), skip_tokenizer_init=True, dtype=self.dtype
        )
        speculation = None
        if self.speculation is not None:
            speculation = SpeculativeConfig(
                target_model_config=model, target_parallel_config=parallel, **self.speculation
            )
        return VllmConfig(
            model_config=model, cache_config=CacheConfig(block_size=self.block, cache_dtype=self.cache_dtype),
            parallel_config=parallel, device_config=DeviceConfig("cpu"), speculative_config=speculation,
        )  # fmt: skip


CHANGES: dict[str, Callable[[Run], None]] = {
    "other weights at the same path": lambda run: run.write_weights(b"other weights"),
    "another configuration at the same path": lambda run: run.write_configuration({"rope_theta": 5e5}),
    "a fingerprint given by hand": lambda run: setattr(run, "fingerprint", "mine"),
    "another dtype": lambda run: setattr(run, "dtype", "float16"),
    "another KV dtype": lambda run: setattr(run, "kv_dtype", torch.float16),
    "a quantized KV cache": lambda run: setattr(run, "cache_dtype", "fp8"),
    "another TP size": lambda run: setattr(run, "tp", 4),
    "another rank": lambda run: setattr(run, "rank", 1),
    "pipeline stages for TP": lambda run: (setattr(run, "tp", 1), setattr(run, "pp", 2)),
    "another block layout": lambda run: setattr(run, "block", 64),
    "another hash seed": lambda run: setattr(run, "seed", "1"),
    "draft tokens from the prompt": lambda run: setattr(
        run, "speculation", {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    ),
    "another LMCache tag": lambda run: setattr(run, "mark", MARK | {"lmcache.tag.user": "b"}),
    "a cache_salt": lambda run: setattr(run, "mark", {TAG_FIELD: scope_of(None, "salt")}),
    "a request that nobody marked": lambda run: setattr(run, "mark", None),
}


@pytest.fixture
def start(lmcache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Run], Any]]:
    """Start LMCache with the plugin as a worker of this run would, on one root."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(vllm_plugin, "_registered", True)

    def start(run: Run) -> Any:
        if run.seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", run.seed)
        metadata = lmcache_metadata(run.kv_dtype, rank=run.rank, world=run.tp * run.pp)
        with set_current_vllm_config(run.vllm_config()):
            return lmcache(metadata, path=root, model_fingerprint=run.fingerprint)

    yield start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    model = tmp_path / "model"
    model.mkdir()
    return Run(model)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_one_run_stored_is_a_miss_to_a_run_that_differs_in_one_fact(start, run, change):
    """Stored by the one, neither promised nor loaded by the other; the first, started again, finds it bit for bit."""
    tokens, kv = prompt(TOKENS), PagedKv(TOKENS)
    first = start(run)
    first.store(tokens, kv, request_configs=run.mark)
    first.settle()
    first.close()

    changed = Run(run.model)
    change(changed)
    other = start(changed)
    assert other.lookup(tokens, request_configs=changed.mark) == 0
    assert other.retrieve(tokens, PagedKv(TOKENS, changed.kv_dtype), request_configs=changed.mark) == 0
    other.close()

    again = start(Run(run.model))
    assert again.lookup(tokens, request_configs=run.mark) == TOKENS
    assert again.retrieve(tokens, kv, request_configs=run.mark) == TOKENS
    assert all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_data_parallel_ranks_of_one_model_share_and_its_tensor_parallel_ranks_do_not(run, rank):
    """What an engine alone stored, each data-parallel rank finds: vLLM's own configuration, LMCache's own metadata."""
    alone = namespace_of(run.vllm_config(), rank)
    ranks = [
        namespace_of(run.vllm_config(data_parallel_size=2, data_parallel_rank=dp, data_parallel_rank_local=dp), rank)
        for dp in (0, 1)
    ]
    assert alone == ranks[0] == ranks[1]
    assert alone != namespace_of(run.vllm_config(), 1 - rank)


def namespace_of(vllm_config: VllmConfig, rank: int) -> str:
    """The namespace's digest for a worker of this rank; vLLM counts ranks within each data-parallel engine."""
    vllm_config.parallel_config.rank = rank
    metadata, config = create_lmcache_metadata(vllm_config)
    settings = parse_settings({"nvme.path": "/x", "nvme.quota_gib": 1})
    return Namespace(namespace_facts(settings, config, metadata, vllm_config)).digest


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize(("rope", "shared"), [(None, True), (LONGROPE, False)], ids=["plain", "longrope"])
def test_the_longest_context_is_a_fact_where_it_shapes_kv(run: Run, rope: dict[str, Any] | None, shared: bool) -> None:
    """LongRoPE takes its long factors for every prompt where contexts may be long: other keys for the same tokens."""
    if rope is not None:
        run.write_configuration({"rope_parameters": rope, "original_max_position_embeddings": 2048})
    configs = [run.vllm_config() for _ in range(2)]
    configs[0].model_config.max_model_len, configs[1].model_config.max_model_len = 2048, 4096
    assert (vllm_facts(configs[0]) == vllm_facts(configs[1])) is shared


def test_what_is_left_at_its_default_is_no_fact_and_what_is_set_is_one(run: Run) -> None:
    """A release that brings a setting leaves the namespaces of those who do not use it."""
    plain = vllm_facts(run.vllm_config())
    changed = run.vllm_config()
    changed.parallel_config.cp_kv_cache_interleave_size = 8
    changed.cache_config.kv_cache_dtype_skip_layers = ["0"]
    more = {"cp_kv_cache_interleave_size": "8", "kv_cache_dtype_skip_layers": '["0"]'}
    assert vllm_facts(changed) == plain | more
    assert not more.keys() & plain.keys()


def test_a_copy_of_the_same_weights_elsewhere_shares_and_tells_where_it_was(start, run, tmp_path):
    """The path is no fact: it is a note beside them, from which a person sees which namespace is which."""
    tokens, kv = prompt(TOKENS), PagedKv(TOKENS)
    first = start(run)
    first.store(tokens, kv, request_configs=MARK)
    first.settle()
    first.close()
    (tmp_path / "copy").mkdir()
    second = start(Run(tmp_path / "copy"))
    assert second.lookup(tokens, request_configs=MARK) == TOKENS
    (description,) = (tmp_path / "root").glob("v1/*/namespace.json")
    told = json.loads(description.read_text())
    assert told["notes"] == {"model_name": str(tmp_path / "copy")} and "copy" not in json.dumps(told["facts"])
