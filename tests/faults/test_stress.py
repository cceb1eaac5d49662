"""Everything at once; `make faults` does it for a minute each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_threads_and_processes_that_do_everything_at_once_never_see_wrong_bytes(tmp_path):
    """Nor an error, a leak, a lost pin or a disk above the quota; also while stores are closed under their threads."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.stress", "--seconds", "10", "--json", "--directory", str(tmp_path)],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout)
    assert [figures[name] for name in ("wrong", "corrupt", "io_errors", "over_quota", "errors")] == [0] * 5
    assert figures["hits"] > 100 and figures["evictions"] > 100 and figures["looks"] > 10
    assert figures["lives"] > 4 and figures["refused_by_close"] > 0
