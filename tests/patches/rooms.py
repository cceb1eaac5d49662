"""One engine room a release: the slow imports are made once, and each scenario runs in a fork of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import wheels


class EngineRoom:
    """A running `engine_room.py` for one release."""

    def __init__(self, version: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {
            "PYTHONPATH": str(wheels.unpacked(version)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "engine_room.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            text=True,
        )
        self.vllm = self._answer()

    def run(self, scenario: str, site: Path | None, **arguments: Any) -> dict[str, Any]:
        """Run a scenario with the offloading scheduler of `site` (None: the release's own)."""
        assert self._process.stdin is not None
        request = {"overlay": str(site) if site else None, "scenario": scenario, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if site is not None:
            assert answer["module"] == str(site / wheels.SCHEDULER), "the scenario did not run the site's own file"
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the engine room ended with {self._process.wait()}")


def release(version: str) -> Any:
    """A release as a test parameter; those beyond the quick two belong to the matrix."""
    return pytest.param(version, marks=() if version in wheels.QUICK else pytest.mark.matrix)
