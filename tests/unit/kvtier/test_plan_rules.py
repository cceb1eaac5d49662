"""One test a rule: what refuses, what changes an argument, what is only said."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvtier.doors import native_transfer
from kvtier.facts import Measured
from kvtier.plan import lmcache, spec, wishes
from kvtier.plan.result import Decision
from kvtier.render.formats import render
from lmcache_nvme_backend.doors.native.settings import settings_of
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import parse_settings
from tests.unit.kvtier.boxes import argument, facts, planned


def test_plan_of_lmcache_is_the_reference_entry() -> None:
    """The LMCache configuration is the documented entry, and the backend's own parser takes it."""
    plan = planned("dgx-spark", "qwen3-gqa", nvme="/mnt/kv-cache", nvme_gib=64)
    config = plan.lmcache_config
    assert config is not None
    assert config == {
        "chunk_size": 256,
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "storage_plugins": ["nvme"],
        "extra_config": {
            "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
            "storage_plugin.nvme.class_name": "NvmeBackend",
            "nvme.path": "/mnt/kv-cache",
            "nvme.quota_gib": 64,
        },
    }
    assert parse_settings(config["extra_config"]).quota_bytes == 64 * 2**30
    assert json.loads(argument(plan, "--kv-transfer-config") or "") == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert plan.env == {"LMCACHE_CONFIG_FILE": "/etc/kvtier/lmcache.yaml", "PYTHONHASHSEED": "0"}


def test_staging_grows_with_the_chunk() -> None:
    """A model whose chunks do not fit four times into the default ring gets a larger one, and hears why."""
    plan = planned("dgx-spark", "llama-dense")
    assert plan.lmcache_config is not None
    assert plan.lmcache_config["extra_config"]["nvme.staging_mib"] == 512
    assert plan.rule("staging-for-large-chunks")


def test_expandable_segments_are_refused_under_both_names() -> None:
    """expandable_segments:True is refused under the newer name too, which vLLM's own check misses."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        box = msgspec.structs.replace(
            facts("rtx-5090"), environment={name: "max_split_size_mb:64,expandable_segments:True"}
        )
        plan = planned(box, "qwen3-gqa")
        assert plan.decision is Decision.REFUSED
        assert name in plan.reasons[-1].sentence


def test_lora_needs_the_plugin_with_lmcache_alone() -> None:
    """This project's tier takes LoRA, its plugin putting the adapter in the keys; vLLM's own tiers need none."""
    plan = planned("dgx-spark", "qwen3-gqa", lora=True)
    assert plan.decision is Decision.LMCACHE_NVME
    assert "plugin must be loaded" in plan.rule("lora-needs-plugin").sentence  # type: ignore[union-attr]
    assert planned("rtx-5090", "qwen3-gqa", lora=True).rule("lora-needs-plugin") is None
    assert planned("rtx-5090", "qwen3-gqa", lora=True).decision is Decision.NATIVE_RAM


def test_sglang_is_named_as_not_offered() -> None:
    """Somebody who asks for SGLang hears that it is not offered, and why."""
    plan = planned("rtx-5090", "qwen3-gqa", engine="sglang")
    assert plan.decision is Decision.REFUSED
    assert "not offered" in plan.reasons[-1].sentence


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "16GiB"])
def test_sizes_are_whole_and_positive(text: str) -> None:
    """0, negative, fractional and wordy sizes are one clear error each."""
    with pytest.raises(ConfigError) as caught:
        wishes.size("--ram-gib", text)
    assert caught.value.setting == "--ram-gib"
    assert "whole number of GiB above 0" in caught.value.allowed


def test_mtp_needs_mtp_layers() -> None:
    """--spec mtp on a model without MTP layers is an error, not an engine that dies."""
    with pytest.raises(ConfigError, match="MTP layers"):
        planned("rtx-5090", "qwen3_5-hybrid", spec="mtp")


def test_context_longer_than_the_model_allows() -> None:
    """--max-model-len beyond the configuration is an error."""
    with pytest.raises(ConfigError, match="--max-model-len"):
        planned("rtx-5090", "llama-dense", max_model_len=65536)


def test_blocks_per_chunk_where_needed() -> None:
    """blocks_per_chunk: 1 for layers of several sorts since 0.26, neither key before, and nothing for a dense model."""

    def extra(model: str, target: str) -> dict[str, object]:
        plan = planned("rtx-5090", model, ram_gib=8, nvme="/data/kv", nvme_gib=8, target_vllm=target)
        return json.loads(argument(plan, "--kv-transfer-config") or "")["kv_connector_extra_config"]

    assert extra("qwen3_5-hybrid", "0.29.0")["blocks_per_chunk"] == 1
    assert extra("gpt-oss-swa", "0.29.0")["blocks_per_chunk"] == 1
    assert "blocks_per_chunk" not in extra("qwen3_5-hybrid", "0.25.1")
    assert "block_size" not in extra("qwen3_5-hybrid", "0.25.1")
    assert "blocks_per_chunk" not in extra("qwen3-gqa", "0.32.0")


def test_unified_hybrid_alternatives_by_version() -> None:
    """A hybrid on unified memory: this project's spec from 0.30 on, vLLM's disk connector from 0.28 on, no tier before;
    each way says what it loses, and an older release why it does not get the newer way."""
    spec = planned("dgx-spark", "qwen3_5-hybrid")
    assert spec.decision is Decision.NVME_SPEC and spec.rule("nvme-spec-not-offered") is None
    assert any(way.loses == "everything at a restart" for way in spec.alternatives)
    new = planned("dgx-spark", "qwen3_5-hybrid", nvme="/data/kv", nvme_gib=64, target_vllm="0.29.0")
    assert new.decision is Decision.NATIVE_NVME
    assert "since 0.30" in new.rule("nvme-spec-not-offered").sentence  # type: ignore[union-attr]
    config = json.loads(argument(new, "--kv-transfer-config") or "")
    assert config["kv_connector"] == "SimpleCPUOffloadConnector"
    assert config["kv_connector_extra_config"]["disk_capacity_bytes"] == 64 * 2**30
    assert new.alternatives[0].loses == "everything at a restart"
    old = planned("dgx-spark", "qwen3_5-hybrid", target_vllm="0.27.1")
    assert old.decision is Decision.NONE
    assert "0.27.1" in old.rule("unified-hybrid-no-tier").sentence  # type: ignore[union-attr]
    assert all(way.loses for way in (*new.alternatives, *old.alternatives))
    assert all(way.name != "vLLM's disk connector" for way in old.alternatives)
    pair = planned("dgx-spark-pair", "qwen3_5-hybrid")
    assert pair.decision is Decision.NONE
    assert "several hosts" in pair.rule("nvme-spec-not-offered").sentence  # type: ignore[union-attr]


def test_the_offloading_spec_is_what_its_own_parser_takes() -> None:
    """One block a chunk for layers of several sorts, 256 tokens else; the quota is the tier's; the pool leaves room for
    the staging ring; the image must hold this package, and LMCache is not asked for."""
    plan = planned("dgx-spark", "qwen3_5-hybrid", nvme="/data/kv", nvme_gib=64)
    config = json.loads(argument(plan, "--kv-transfer-config") or "")
    assert config == native_transfer("/data/kv", 64, mixed=True)
    extra = config["kv_connector_extra_config"]
    assert extra["blocks_per_chunk"] == 1 and "block_size" not in extra
    assert "block_size" in native_transfer("/data/kv", 64, mixed=False)["kv_connector_extra_config"]
    settings = settings_of(extra)
    assert (settings.path, settings.quota_bytes) == ("/data/kv", 64 * 2**30)
    assert settings.staging_bytes == spec.STAGING == lmcache.DEFAULT_STAGING
    assert config["kv_load_failure_policy"] == "recompute"
    assert plan.env == {"PYTHONHASHSEED": "0"} and plan.lmcache_config is None
    assert plan.needs_package and "lmcache-nvme-backend" in render(plan, "compose")
    older = planned("dgx-spark", "qwen3_5-hybrid", target_vllm="0.29.0")
    less = int(argument(older, "--kv-cache-memory-bytes") or 0) - int(argument(plan, "--kv-cache-memory-bytes") or 0)
    assert less == spec.STAGING


def test_the_other_door_is_an_alternative_where_both_would_do() -> None:
    """A dense model on unified memory gets the LMCache plugin and hears of the spec, where the release has it."""
    ways = [way.name for way in planned("dgx-spark", "qwen3-gqa").alternatives]
    assert "this project's offloading spec, without LMCache" in ways
    assert planned("dgx-spark", "qwen3-gqa", target_vllm="0.29.0").alternatives == []
    assert planned("dgx-spark-pair", "qwen3-gqa").alternatives == []


def test_fixed_pool_on_unified_memory_is_explained() -> None:
    """Unified memory gets a fixed KV pool whose sum of parts is the box, from the safetensors index."""
    plan = planned("dgx-spark", "qwen3-gqa")
    pool = int(argument(plan, "--kv-cache-memory-bytes") or 0)
    weights = 65524246528
    assert 0 < pool < facts("dgx-spark").ram_total - weights - 9 * 2**30
    assert "model.safetensors.index.json" in plan.rule("fixed-kv-pool").sentence  # type: ignore[union-attr]
    half = int(argument(planned("dgx-spark-pair", "qwen3-gqa"), "--kv-cache-memory-bytes") or 0)
    assert abs(half - pool - weights // 2) < 2**30


def test_fixed_pool_is_left_out_without_an_index(tmp_path) -> None:
    """Without the weights' bytes the pool is left out, and the reason is said."""
    from kvtier.plan.decide import plan as decide
    from kvtier.plan.wishes import Wishes
    from tests.unit.kvtier.boxes import UNIT

    (tmp_path / "config.json").write_bytes((UNIT / "models/qwen3-gqa/config.json").read_bytes())
    plan = decide(facts("dgx-spark"), str(tmp_path), Wishes())
    assert "--kv-cache-memory-bytes" not in plan.vllm_args
    assert plan.rule("fixed-kv-pool-left-out") in plan.warnings


def test_carve_out_is_counted_as_the_devices() -> None:
    """96 GiB carved out of 128 hold the pool themselves, and 512 MiB of VRAM are a window onto the rest."""
    large = int(argument(planned("strix-halo-96g", "llama-dense"), "--kv-cache-memory-bytes") or 0)
    small = int(argument(planned("strix-halo", "llama-dense"), "--kv-cache-memory-bytes") or 0)
    assert 70 * 2**30 < large < 96 * 2**30
    assert 80 * 2**30 < small < 125 * 2**30


def test_swap_on_unified_memory_is_warned_of() -> None:
    """Swap and zram are warned of on unified memory, with the command that ends it."""
    plan = planned("jetson-orin", "llama-dense")
    assert "zram" in plan.rule("swap-catches-pool").sentence  # type: ignore[union-attr]
    assert any(step.command == "swapoff -a" for step in plan.steps)
    assert planned("jetson-thor", "llama-dense").rule("swap-catches-pool") is None


def test_cpu_plan_names_the_connector() -> None:
    """A CPU-only box gets the disk tier with this project's CPU connector and a pool that leaves RAM."""
    plan = planned("cpu-only", "llama-dense", nvme="/var/kv", nvme_gib=20)
    assert plan.decision is Decision.LMCACHE_NVME
    assert plan.rule("cpu-connector")
    assert 1 <= int(plan.env["VLLM_CPU_KVCACHE_SPACE"]) <= 16
    assert plan.command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]


def test_estimate_uses_given_before_measured_before_assumed() -> None:
    """The restore time follows the given rate, else the measured one, else one that is called assumed."""
    box = msgspec.structs.replace(facts("dgx-spark"), measured=Measured(disk_read=6e9))
    given = planned(box, "qwen3-gqa", nvme_gbps=12.0, prefill_tokens_per_s=2000.0).estimates[0]
    measured = planned(box, "qwen3-gqa").estimates[0]
    assumed = planned("dgx-spark", "qwen3-gqa").estimates[0]
    assert given.rate_bytes_per_s == 12e9 and "given" in given.rate_source
    assert measured.rate_bytes_per_s == 6e9 and "measured" in measured.rate_source
    assert "assumed" in assumed.rate_source
    assert given.prefill_s == pytest.approx(131072 / 2000, rel=0.01)
    assert given.pays_from_tokens is not None and given.pays_from_tokens % 256 == 0
    assert measured.prefill_s is None


def test_tier_that_never_pays_has_no_length() -> None:
    """Where reading back is slower than computing, no prompt length is named."""
    slow = planned("dgx-spark", "llama-dense", nvme_gbps=0.2, prefill_tokens_per_s=5000.0).estimates[0]
    assert slow.pays_from_tokens is None
    assert slow.break_even_prefill_tokens_per_s < 5000


def test_user_says_unified() -> None:
    """The user's word goes before everything found."""
    from kvtier.detect.box import overrule
    from kvtier.facts import Memory

    plan = planned(overrule(facts("rtx-5090"), Memory.UNIFIED), "qwen3_5-hybrid")
    assert plan.decision is Decision.NVME_SPEC
    assert plan.rule("memory-is-unified")


def test_nodes_are_parsed_and_checked() -> None:
    """--nodes takes names, addresses and interfaces; a bare number says what is wanted."""
    both = wishes.nodes("spark-0=10.0.0.1@eth1,10.0.0.2")
    assert [(node.name, node.address, node.interface) for node in both] == [
        ("spark-0", "10.0.0.1", "eth1"),
        ("node-1", "10.0.0.2", None),
    ]
    with pytest.raises(ConfigError, match="--nodes"):
        wishes.nodes("2")


def test_advice_reaches_every_host() -> None:
    """What a start-up log decides is in the arguments of every host."""
    from kvtier.plan.advice import EngineFigures

    figures = EngineFigures(source="log", pool_tokens=300_000, context=131072, max_num_seqs=64)
    plan = planned("dgx-spark-pair", "qwen3-gqa", figures=figures)
    for node in plan.nodes:
        assert node.vllm_args[node.vllm_args.index("--max-num-seqs") + 1] == "9"
