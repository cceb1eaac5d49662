"""The native door in the vLLM releases it serves, by their unpacked wheels; and in one it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests import wheels
from tests.overlays import ROOT

# The installed release runs in the other tests of this folder.
SERVED = [pytest.param(version, marks=pytest.mark.matrix) for version in ("0.30.0", "0.31.0")]
SCENARIOS = ("restart_full", "restart_hybrid", "damaged_attention", "damaged_state")


def python(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with that release first on its path."""
    paths = [str(wheels.unpacked(version)), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("version", SERVED)
def test_a_release_serves_restarts_and_damage_as_the_installed_one_does(version: str, tmp_path: Path) -> None:
    """Full attention and hybrid: served from the drive after a restart, and a failed load is a recompute."""
    done = python(version, "-m", "tests.integration.native.room", str(tmp_path), *SCENARIOS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["vllm"] == version
    assert found["restart_full"]["served"] == found["restart_hybrid"]["served"] == [0, 992, 992]
    for name in ("damaged_attention", "damaged_state"):
        assert found[name]["loads"] == [65]
        assert (found[name]["again"], found[name]["again_loads"]) == (992, 1)
        assert found[name]["corrupt"] == 1


@pytest.mark.slow
def test_a_release_that_cannot_be_told_of_a_failed_load_is_refused_by_name() -> None:
    """0.29 would end the engine with the first chunk that cannot be read."""
    done = python("0.29.0", "-c", "import lmcache_nvme_backend as door; door.NvmeOffloadingConnector")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: vllm: found 0.29" in last
    assert "0.30 to 0.32" in last
