"""Processes killed at random and at named points; `make faults` kills a thousand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
KILLS = 65  # five at each point


def test_a_killed_process_costs_the_stores_on_their_way_and_nothing_else(tmp_path):
    """After every kill a fresh process finds what had its name, bit for bit, within the quota, the account right, no
    temporary, no session, no lock, and a process beside the killed one goes on."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.campaign", "--kills", str(KILLS), "--seed", "6", "--json",
         "--directory", str(tmp_path)],
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert all(row["kills"] == 5 for row in rows.values()) and sum(row["kills"] for row in rows.values()) == KILLS
    for broken in ("lost", "wrong", "over_quota", "other"):
        assert [row[broken] for row in rows.values()] == [0] * len(rows)
    assert sum(row["survivors"] for row in rows.values()) > 5 * KILLS
    assert sum(row["loads"] for row in rows.values()) > KILLS / 2
    # Each but where a neighbour stored the very same.
    assert rows["before the rename"]["lost_newest"] >= 3 and rows["between rename and index"]["lost_newest"] < 5
