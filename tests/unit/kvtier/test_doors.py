"""What the doors put on vLLM's command line, and what the demo makes of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from kvtier.demo import DemoOptions, _spec
from kvtier.demo_doors import HOST_BYTES, QUOTA_GIB, door
from kvtier.doors import DOORS, PLUGIN_TRANSFER, known_door, tier_transfer
from kvtier.engine import EngineSpec
from kvtier.lmcache_server import nvme_adapter
from kvtier.scrape import Metrics
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import UNIT

MODELS = UNIT / "models"


def model(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(MODELS / name / "config.json", folder)
    return folder


def transfer(command):
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def started(name, folder, tmp_path):
    """The command line, environment and side of one life."""
    with door(name, folder)(tmp_path / "nvme", tmp_path) as side:
        spec = EngineSpec(model=folder, log=tmp_path / "log", lmcache_config=side.lmcache_config, args=side.args)
        return spec.command(1), spec.environment({}), side


def test_a_door_that_is_none_is_one_error():
    """It names the option and the doors that there are."""
    assert [known_door(name) for name in DOORS] == list(DOORS)
    with pytest.raises(ConfigError, match="--door") as caught:
        known_door("window")
    assert all(name in caught.value.allowed for name in DOORS)


def test_the_plugin_is_lmcaches_configuration(tmp_path):
    """The folder and the quota stand in LMCache's file; the pool's bytes are what the tier itself exports."""
    command, env, side = started("plugin", model(tmp_path, "qwen3-gqa"), tmp_path)
    assert transfer(command) == PLUGIN_TRANSFER
    config = yaml.safe_load((tmp_path / "lmcache.yaml").read_text())
    assert env["LMCACHE_CONFIG_FILE"] == str(tmp_path / "lmcache.yaml")
    assert config["extra_config"]["nvme.path"] == str(tmp_path / "nvme")
    assert side.host_pool_bytes(Metrics("kvtier_lmcache_cpu_pool_bytes 7\n")) == 7


@pytest.mark.parametrize(("name", "mixed"), [("qwen3-gqa", False), ("qwen3_5-hybrid", True), ("gpt-oss-swa", True)])
def test_the_native_spec_has_no_host_pool(tmp_path, name, mixed):
    """One block a chunk where layers are of several sorts, 256 tokens else."""
    command, env, side = started("native", model(tmp_path, name), tmp_path)
    extra = transfer(command)["kv_connector_extra_config"]
    assert (extra["root_dir"], extra["quota_gib"]) == (str(tmp_path / "nvme"), QUOTA_GIB)
    assert (extra.get("blocks_per_chunk"), extra.get("block_size")) == ((1, None) if mixed else (None, 256))
    assert side.host_pool_bytes(Metrics("")) == 0 and "LMCACHE_CONFIG_FILE" not in env


def test_the_tier_stands_behind_vllms_own_host_tier(tmp_path):
    """vLLM's own spec on a device, this project's on a CPU; the host tier's bytes are the ones it was given."""
    command, _, side = started("tier", model(tmp_path, "qwen3_5-hybrid"), tmp_path)
    extra = transfer(command)["kv_connector_extra_config"]
    assert extra["spec_name"] == "CpuTieringOffloadingSpec" and extra["spec_module_path"] == "lmcache_nvme_backend"
    assert extra["cpu_bytes_to_use"] == side.host_pool_bytes(Metrics("")) == HOST_BYTES
    (tier,) = extra["secondary_tiers"]
    assert tier == {
        "type": "NvmeTier", "module_path": "lmcache_nvme_backend", "root_dir": str(tmp_path / "nvme"),
        "quota_gib": QUOTA_GIB,
    }  # fmt: skip
    on_device = tier_transfer("/kv", 2, HOST_BYTES, mixed=False)["kv_connector_extra_config"]
    assert on_device["spec_name"] == "TieringOffloadingSpec" and "spec_module_path" not in on_device


def test_lmcaches_server_is_a_process_beside_the_engine():
    """Its adapter has the folder and the quota, and its pool is what a whole prompt needs."""
    adapter = nvme_adapter(Path("/kv"), QUOTA_GIB)
    assert adapter["adapter_params"] == {"root_dir": "/kv", "quota_gib": QUOTA_GIB}
    assert (adapter["module_path"], adapter["class_name"]) == ("lmcache_nvme_backend", "NvmeL2Adapter")


@pytest.mark.parametrize(("name", "precise"), [("random", True), ("hybrid", False), (None, False)])
def test_the_random_llama_is_served_in_float32(tmp_path, name, precise):
    """Its near ties are not decided by rounding; vLLM's delta nets on a CPU take bfloat16 alone."""
    folder = model(tmp_path, "qwen3-gqa")
    with door("native", folder)(tmp_path / "nvme", tmp_path) as side:
        command = _spec(DemoOptions(model=name), folder, side, tmp_path / "log").command(1)
    assert ("float32" in command) == precise


@pytest.mark.parametrize("refused", ["plugin", "mp"])
def test_a_hybrid_model_is_refused_with_the_door_that_serves_it(tmp_path, refused):
    """One error before anything is started."""
    hybrid = model(tmp_path, "qwen3_5-hybrid")
    with pytest.raises(ConfigError, match="--door native") as caught:
        door(refused, hybrid)
    assert caught.value.setting == "--door"
    for name in ("native", "tier"):
        door(name, hybrid)
