"""The same under other releases of vLLM, unpacked from their wheels and put first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import wheels

pytest.importorskip("vllm")

VERSIONS = [
    pytest.param(version, marks=() if version in wheels.QUICK else pytest.mark.matrix)
    for version in ("0.29.0", "0.30.0", "0.31.0", "0.33.0")
]
WITHOUT_WHEEL = ("0.33.0",)  # on a CPU
LOOK = "import vllm; print(vllm.__version__)"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_tier_works_under_this_releases_own_manager(version: str) -> None:
    """Names and shapes of the tiering layer differ from 0.29 to 0.33; the tier does not."""
    root = Path(__file__).parents[3]
    found = wheels.source(version) if version in WITHOUT_WHEEL else wheels.unpacked(version)
    places = (found, root, root / "configs", root / "patches")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    seen = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.strip().startswith(version)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(str(Path(__file__).parent / name) for name in ("test_manager.py", "test_stalls.py")),
    ]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-6000:]
