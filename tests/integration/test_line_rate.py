"""The line-rate benchmark, small, on the real LMCache: a context larger than the ring, in memory that stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lmcache")

ROOT = Path(__file__).resolve().parents[2]


def test_memory_grows_by_the_ring_at_most_whatever_the_context(tmp_path):
    """Twice the ring passes through it, both ways, checksums on; the benchmark itself fails where bytes differ."""
    target = tmp_path / "rows.json"
    folder = tmp_path / "drive"
    folder.mkdir()
    command = [sys.executable, str(ROOT / "benchmarks/line_rate.py"), "--directory", str(folder), "--json", str(target)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "configs")])}
    subprocess.run(
        [*command, "--gib", "0.5", "--chunks", "6", "--rounds", "1", "--no-peers"],
        env=environment, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    found = json.loads(target.read_text())
    rows = {row["operation"]: row for row in found["rows"] if row["subject"] == "nvme-backend"}
    assert set(rows) == {"store", "load"}
    for row in rows.values():
        assert row["value"] > 0
        assert row["rss_growth_mib"] <= found["staging_mib"] + 32
        if found["machine"]["fio"] is not None:
            assert row["share_of_fio"] > 0
    assert list(folder.iterdir()) == []
