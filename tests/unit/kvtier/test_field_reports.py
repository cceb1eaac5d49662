"""The two set-ups of the field reports come out of the plan, to the flag."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvtier.plan.advice import from_log
from kvtier.plan.disk import Place, loopback_recipe
from kvtier.plan.result import Decision
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import UNIT, argument, facts, planned

B70 = dict(ram_gib=16, nvme_gib=64, max_model_len=131072, kv_cache_dtype="fp8", spec="mtp", spec_tokens=4)


def b70(box: str = "arc-pro-b70", **more: object):
    figures = from_log(UNIT / "logs" / "arc-pro-b70-before.log")
    return planned(box, "qwen3_5-hybrid-mtp", **{**B70, "figures": figures, **more})


def test_report_a_final_arguments() -> None:
    """The B70 box with 16 GiB of RAM and 64 GiB of NVMe gets report A's final configuration."""
    plan = b70()
    assert plan.decision is Decision.NATIVE_RAM_NVME
    assert json.loads(argument(plan, "--kv-transfer-config") or "") == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 16 * 2**30,
            "blocks_per_chunk": 1,
            "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv-cache", "n_read_threads": 8, "n_write_threads": 8}],
        },
    }
    assert plan.env == {"PYTHONHASHSEED": "0"}
    assert argument(plan, "--gpu-memory-utilization") == "0.94"
    assert argument(plan, "--max-num-seqs") == "4"
    assert argument(plan, "--max-num-batched-tokens") == "16384"
    assert json.loads(argument(plan, "--speculative-config") or "") == {"method": "mtp", "num_speculative_tokens": 4}
    assert "--kv-offloading-size" not in plan.vllm_args


def test_report_a_capacity() -> None:
    """16 GiB hold about 500k tokens and 64 GiB about two million, 15 full contexts, at 32 KiB a token and the draft
    layer's 2."""
    plan = b70()
    assert plan.kv_bytes_per_token == 16 * 2 * 4 * 256 == 32768
    ram, nvme = plan.tiers
    assert round(ram.tokens, -5) == 500_000
    assert round(nvme.tokens, -6) == 2_000_000
    assert int(nvme.full_contexts) == 15


def test_report_a_needs_the_patches() -> None:
    """MTP on a hybrid under 0.27 stores and never serves: the plan names the patches, and their state where it is
    known."""
    plan = b70()
    assert [patch.name for patch in plan.patches] == ["vllm-52771", "vllm-52807"]
    assert plan.rule("spec-decode-on-hybrid") in plan.warnings
    box = msgspec.structs.replace(facts("arc-pro-b70"), patches={"vllm-52771": "applied", "vllm-52807": "applied"})
    patched = b70(box)
    assert {patch.state for patch in patched.patches} == {"applied"}
    assert patched.rule("spec-decode-on-hybrid") not in patched.warnings
    assert b70(target_vllm="0.30.0").patches == []


def test_report_a_shm_two_mib_too_small() -> None:
    """/dev/shm of 16,352 MiB does not hold 16 GiB: refused, with the remount to 24G that the report needed."""
    plan = b70("arc-pro-b70-before", nvme="/mnt/kv-cache")
    assert plan.decision is Decision.REFUSED
    assert plan.steps[0].command == "mount -o remount,size=24G /dev/shm"
    assert "16,352 MiB" in plan.reasons[-1].sentence


def test_report_a_loopback_recipe() -> None:
    """Where the file system is no cap, the plan prints how to make one: a 64 GiB ext4 image mounted with noatime."""
    box = msgspec.structs.replace(facts("arc-pro-b70"), disks=facts("arc-pro-b70-before").disks)
    plan = b70(box, nvme="/mnt/kv-cache")
    assert plan.rule("fs-tier-has-no-quota")
    step = next(step for step in plan.steps if "loopback" in step.why)
    assert step.required
    assert (
        step.command
        == loopback_recipe(Place("/mnt/kv-cache", 64 * 2**30, None, False))
        == (
            "fallocate -l 64G /mnt/kv-cache.img && mkfs.ext4 -q -m 0 -F /mnt/kv-cache.img && mkdir -p /mnt/kv-cache && "
            "mount -o loop,noatime /mnt/kv-cache.img /mnt/kv-cache"
        )
    )
    assert b70().rule("fs-tier-has-no-quota") is None


def test_report_b_final_arguments() -> None:
    """The RTX 5090 node with 32 GiB gets the two flags of report B and no connector beside them."""
    plan = planned("rtx-5090", "qwen3_5-hybrid", ram_gib=32, kv_cache_dtype="fp8")
    assert plan.decision is Decision.NATIVE_RAM
    assert plan.vllm_args[-4:] == ["--kv-offloading-size", "32", "--kv-offloading-backend", "native"]
    assert "--kv-transfer-config" not in plan.vllm_args
    assert 900_000 < plan.tiers[0].tokens < 1_100_000


def test_report_b_disk_tier_of_the_spark_pair() -> None:
    """The pair of Sparks gets the disk tier: LMCache without a CPU pool, 256-token chunks, a directory a rank."""
    plan = planned("dgx-spark-pair", "qwen3-gqa", nvme="/mnt/kv-cache", nvme_gib=512)
    assert plan.decision is Decision.LMCACHE_NVME
    assert [node.rank for node in plan.nodes] == [0, 1]
    for node in plan.nodes:
        assert node.lmcache_config is not None
        assert (node.lmcache_config["local_cpu"], node.lmcache_config["max_local_cpu_size"]) == (False, 0)
        assert node.lmcache_config["chunk_size"] == 256
        assert node.lmcache_config["lookup_server_worker_ids"] == [0]
        assert node.lmcache_config["extra_config"]["nvme.path"] == f"/mnt/kv-cache/rank-{node.rank}"
        assert node.env["PYTHONHASHSEED"] == "0"
        assert f"ssh {node.name} kvtier doctor --engine-env" in node.check
    assert "--headless" not in plan.nodes[0].vllm_args
    assert "--headless" in plan.nodes[1].vllm_args
    assert plan.rule("lost-node-cache")
    assert plan.rule("environment-reaches-every-host")
    one = planned("dgx-spark", "qwen3-gqa", nvme="/mnt/kv-cache", nvme_gib=512).tiers[-1]
    assert plan.tiers[-1].tokens == 2 * one.tokens


@pytest.mark.parametrize(("wish", "value"), [("ram_gib", 64), ("nvme_gib", 5000)])
def test_more_than_the_box_has(wish: str, value: int) -> None:
    """A size larger than the RAM or the disk is one clear error that names the setting."""
    with pytest.raises(ConfigError, match="--" + wish.replace("_", "-")):
        planned("arc-pro-b70", "qwen3_5-hybrid", **{"nvme": "/", "nvme_gib": 10, "ram_gib": 8, wish: value})
