"""The mark that vLLM's process puts into LMCache's keys, from vLLM's own configuration."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvtier.model import find_model
from lmcache_nvme_backend.doors import vllm_plugin
from lmcache_nvme_backend.doors.mp import engine_mark
from lmcache_nvme_backend.doors.mp.identity import split_mark

TRANSFER = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@pytest.fixture(scope="module")
def model() -> Path:
    return find_model("random", lambda _: None)


def config(model: Path, identity: Any = "auto", transfer: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """vLLM's configuration for these arguments, with whatever its plugins do to it."""
    vllm_plugin.register()
    extra = {"lmcache.mp.port": 1} | ({} if identity is None else {engine_mark.ASKED: identity})
    connector = KVTransferConfig(**{**TRANSFER, "kv_connector_extra_config": extra, **(transfer or {})})
    made = EngineArgs(model=str(model), kv_transfer_config=connector, max_model_len=2048, **arguments)
    return made.create_engine_config()


def mark(*args: Any, **arguments: Any) -> str | None:
    found: str | None = config(*args, **arguments).kv_transfer_config.kv_connector_extra_config.get(engine_mark.MARK)
    return found


def test_the_mark_is_there_where_it_is_asked_for_and_tells_configurations_apart(model, tmp_path):
    """The same twice; another with other numbers, blocks or weights, and with the user's own word."""
    assert mark(model, identity=None) is None
    copied = {"kv_connector_extra_config": {engine_mark.MARK: "ab" * 16}}
    assert mark(model, identity=None, transfer=copied) is None
    base = mark(model, dtype="float32")
    assert base is not None and base == mark(model, dtype="float32")
    other = tmp_path / model.name
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert mark(other, dtype="float32") == base
    (weights,) = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = {
        base,
        mark(other, dtype="float32"),
        mark(model, dtype="bfloat16"),
        mark(model, dtype="float32", block_size=64),
        mark(model, "my-weights-7", dtype="float32"),
        mark(model, dtype="float32", hf_overrides={"rope_theta": 12345.0}),
    }
    assert len(found) == 6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"transfer": {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy"),
        ({"identity": ""}, "kvtier.identity"),
        ({"transfer": {"kv_connector": "LMCacheConnectorV1"}}, "LMCacheMPConnector"),
    ],
)
def test_what_the_keys_cannot_tell_apart_ends_the_start(model, changes, named):
    """LoRA adapters would share KV, a failed load would end its request, and a mark elsewhere would prove nothing."""
    with pytest.raises(SystemExit, match=named):
        config(model, **changes)


def test_both_of_lmcaches_adapters_use_the_marked_name():
    """The scheduler's and the worker's keys agree; without a mark nothing is changed."""
    for _ in range(2):
        engine_mark.arm()  # a second call must not mark a name twice
    from lmcache.integration.vllm import vllm_multi_process_adapter as module

    for name in ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter"):
        original = getattr(getattr(module, name).__init__, "__wrapped__", None)
        assert original is not None and not hasattr(original, "__wrapped__"), name
    seen: list[Any] = []
    engine_mark._init_adapter(
        lambda *args, **kwargs: seen.append((args, kwargs)), None, ("url", None, "model"), {"extra_config": {}}
    )
    extra = {engine_mark.MARK: "ab" * 16}
    for args, kwargs in ((("url", None, "model"), {}), (("url",), {"model_name": "model"})):
        engine_mark._init_adapter(
            lambda *args, **kwargs: seen.append((args, kwargs)), None, args, {**kwargs, "extra_config": extra}
        )
    names = [kwargs.get("model_name") or args[2] for args, kwargs in seen]
    assert names == ["model", f"model#kvtier-{'ab' * 16}", f"model#kvtier-{'ab' * 16}"]
    assert split_mark(names[1])[0] == "model"


def test_lmcaches_own_parser_takes_what_is_rendered():
    """`lmcache server` accepts every argument of `kvtier render --door mp`, and knows the adapter by it."""
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.distributed.config import parse_args_to_config

    from kvtier.render.lmcache_server import render
    from tests.unit.kvtier import examples
    from tests.unit.kvtier.boxes import UNIT

    plan = examples.make(next(example for example in examples.EXAMPLES if example.name == "cpu-laptop"), UNIT)
    (line,) = [line for line in render(plan, "redis://kv").splitlines() if "lmcache server" in line]
    words = shlex.split(line)
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    parsed = parse_args_to_config(parser.parse_args(words[words.index("server") + 1 :]))
    (adapter,) = parsed.l2_adapter_config.adapters
    assert adapter.class_name == "NvmeL2Adapter"
    assert adapter.adapter_params["behind"] == {"type": "resp", "host": "kv", "port": 6379}
