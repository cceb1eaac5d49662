"""What is rendered is read by the real thing: vLLM's own parser, LMCache's own loader. No engine is started."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.detect.memory import main_devices
from kvtier.plan.result import Plan
from kvtier.render.formats import render
from tests.unit.kvtier.boxes import BOXES, MODELS, facts, planned

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("lmcache", reason="needs LMCache")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve` of the installed release."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def _plans() -> Iterator[tuple[str, Plan]]:
    for box in BOXES:
        found = facts(box)
        devices = len(main_devices(found.devices)) * max(len(found.nodes), 1)
        shapes: list[dict[str, Any]] = [
            {},
            {"nvme": "/data/kv", "nvme_gib": 50},
            {
                "max_model_len": 32768,
                "kv_cache_dtype": "fp8",
                "tp": 2 if devices >= 2 else 1,
                "pp": 2 if devices >= 4 else 1,
                "nvme": "/data/kv",
                "nvme_gib": 50,
            },
        ]
        for model in MODELS:
            for number, wishes in enumerate(shapes):
                spec = {"spec": "mtp", "spec_tokens": 4} if model.endswith("-mtp") else {}
                plan = planned(box, model, **wishes, **spec)
                if plan.serves:
                    yield f"{box}/{model}/{number}", plan


PLANS = dict(_plans())


def _lines(plan: Plan) -> list[list[str]]:
    """The command lines of all ranks, from the model on, as a shell would hand them over."""
    ranks = range(max(len(plan.nodes), 1))
    return [shlex.split(render(plan, "args", rank))[len(plan.command) - 1 :] for rank in ranks]


def test_every_plan_parses(parser: argparse.ArgumentParser) -> None:
    """vLLM's parser takes the arguments of every plan of the matrix, and reads the values that were meant."""
    assert len(PLANS) > 300
    for name, plan in PLANS.items():
        for rank, line in enumerate(_lines(plan)):
            parsed = parser.parse_args(line)
            assert parsed.enable_prefix_caching is True, name
            transfer = parsed.kv_transfer_config
            if plan.decision == "native-ram":
                assert (parsed.kv_offloading_size * 2**30, parsed.kv_offloading_backend) == (
                    plan.tiers[0].bytes,
                    "native",
                ), name
                assert transfer is None, name
            elif plan.decision == "none":
                assert transfer is None, name
            else:
                assert transfer.kv_load_failure_policy == "recompute", name
                assert transfer.kv_role == "kv_both", name
            if plan.nodes:
                assert (parsed.nnodes, parsed.node_rank, parsed.headless) == (len(plan.nodes), rank, rank > 0), name
                assert parsed.tensor_parallel_size % len(plan.nodes) == 0, name


def test_tiering_extra_config_is_taken_by_the_real_spec_factory() -> None:
    """vLLM's own factories know the spec, the fs tier and its arguments as they are rendered."""
    import inspect

    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    plan = PLANS["rtx-5090/qwen3_5-hybrid/1"]
    import json

    extra = json.loads(plan.vllm_args[plan.vllm_args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    spec = OffloadingSpecFactory.get_spec_cls(extra)
    assert spec.__name__ == "TieringOffloadingSpec"
    (tier,) = extra["secondary_tiers"]
    known = inspect.signature(SecondaryTierFactory.get_tier_class(tier).__init__).parameters
    assert set(tier) - {"type"} <= set(known)
    assert spec.build_metric_definitions(extra)


def test_disk_connector_knows_every_key() -> None:
    """The keys for vLLM's disk connector are keys that its source reads."""
    import inspect
    import json

    from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector as connector

    plan = planned("dgx-spark", "qwen3_5-hybrid", nvme="/data/kv", nvme_gib=50, target_vllm="0.29.0")
    config = json.loads(plan.vllm_args[plan.vllm_args.index("--kv-transfer-config") + 1])
    assert hasattr(connector, config["kv_connector"])
    source = inspect.getsource(connector)
    assert all(f'"{key}"' in source for key in config["kv_connector_extra_config"])


def test_the_native_door_is_found_by_vllms_own_factories() -> None:
    """Spec and connector load by the names and the module that are rendered, and the door takes its settings."""
    import json

    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    from lmcache_nvme_backend.doors.native.settings import check_connector, settings_of
    from lmcache_nvme_backend.doors.refusals import check_policy

    plans = {name: plan for name, plan in PLANS.items() if plan.decision == "nvme-spec"}
    assert len(plans) > 10
    for name, plan in plans.items():
        config = json.loads(plan.vllm_args[plan.vllm_args.index("--kv-transfer-config") + 1])
        extra = config["kv_connector_extra_config"]
        nvme = next(tier for tier in plan.tiers if tier.name == "nvme")
        assert (settings_of(extra).path, settings_of(extra).quota_bytes) == (nvme.path, nvme.bytes), name
        check_connector(config["kv_connector"])
        check_policy(config["kv_load_failure_policy"])
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == "NvmeOffloadingSpec"
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**config)).__name__ == "NvmeOffloadingConnector"


def test_lmcache_loads_every_yaml(tmp_path: Path) -> None:
    """LMCache's loader reads every rendered YAML to the values that were meant, and the backend takes its part."""
    from lmcache.v1.config import LMCacheEngineConfig

    from lmcache_nvme_backend.settings import names_this_backend, parse_settings

    loaded = 0
    for name, plan in PLANS.items():
        for rank in range(max(len(plan.nodes), 1)):
            wanted = plan.nodes[rank].lmcache_config if plan.nodes else plan.lmcache_config
            if wanted is None:
                continue
            file = tmp_path / "lmcache.yaml"
            file.write_text(render(plan, "yaml", rank))
            config = LMCacheEngineConfig.from_file(str(file))
            assert (config.chunk_size, config.local_cpu, config.max_local_cpu_size) == (256, False, 0), name
            assert config.pre_caching_hash_algorithm == "sha256_cbor"
            assert names_this_backend(config.extra_config, config.storage_plugins), name
            assert parse_settings(config.extra_config).quota_gib == wanted["extra_config"]["nvme.quota_gib"], name
            assert config.lookup_server_worker_ids == ([0] if plan.nodes else None), name
            loaded += 1
    assert loaded > 50
