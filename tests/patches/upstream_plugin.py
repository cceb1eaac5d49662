"""A pytest plugin under which the tests of vLLM 0.30 can be collected on 0.29 with a patched offloading scheduler.

`OVERLAY` is the tree with the patched file, empty for the release's own; `UPSTREAM` the unpacked source archive. Names
that 0.30's tests import and 0.29 does not have become empty classes: a test that really uses one fails, and is not in
the list of those that apply.
"""

from __future__ import annotations

import ast
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


_overlay()
_missing_names()
_block_state()
