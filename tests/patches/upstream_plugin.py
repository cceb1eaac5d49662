"""A pytest plugin under which the tests of vLLM 0.30 can be collected on 0.29 with a patched offloading scheduler.

`OVERLAY` is the tree with the patched file, empty for the release's own; `UPSTREAM` the unpacked source archive. Names
that 0.30's tests import and 0.29 does not have become empty classes: a test that really uses one fails, and is not in
the list of those that apply.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
FILES = tuple(f"offloading_connector/{name}.py" for name in ("test_scheduler", "test_config", "utils"))


def _overlay() -> None:
    if os.environ["OVERLAY"]:
        package = importlib.import_module(OFFLOADING)
        package.__path__.insert(0, str(Path(os.environ["OVERLAY"]).joinpath(*OFFLOADING.split("."))))


def _missing_names() -> None:
    unit = Path(os.environ["UPSTREAM"]) / "tests/v1/kv_connector/unit"
    for file in (*FILES, "utils.py"):
        for node in ast.walk(ast.parse((unit / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
                _provide(node.module, [alias.name for alias in node.names])


def _provide(name: str, members: list[str]) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        module = sys.modules[name] = types.ModuleType(name)
    for member in members:
        if not hasattr(module, member) and importlib.util.find_spec(name) is None:
            setattr(module, member, type(member, (), {}))
        elif not hasattr(module, member):
            try:
                importlib.import_module(f"{name}.{member}")
            except ModuleNotFoundError:
                setattr(module, member, type(member, (), {}))


def _block_state() -> None:
    """0.30 gave this class other fields; the tests of this fix only carry boundary states in it."""
    from vllm.v1.core.sched import output

    known = output.KVConnectorBlockState
    fields = set(known.__dataclass_fields__)
    output.KVConnectorBlockState = lambda **given: known(**{f: given.get(f) for f in fields})


def _policy_name() -> None:
    """0.30 renamed a member of this enumeration."""
    from vllm.v1.kv_offload.base import OffloadPolicy

    type.__setattr__(OffloadPolicy, "CHUNK_LEVEL", OffloadPolicy.BLOCK_LEVEL)


def _local_model() -> None:
    """The tests ask for a small model's configuration from the network; `MODEL` has the same one."""
    utils = importlib.import_module("tests.v1.kv_connector.unit.utils")
    named = utils.create_vllm_config.__defaults__
    utils.create_vllm_config.__defaults__ = tuple(
        os.environ["MODEL"] if default == "facebook/opt-125m" else default for default in named
    )
    utils.ModelConfig = functools.partial(utils.ModelConfig, skip_tokenizer_init=True)


_overlay()
_missing_names()
_block_state()
_policy_name()
_local_model()
