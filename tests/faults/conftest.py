"""Fixtures of the fault campaign."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory for a store, on a disk where the machine's temporary directory is on one."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def fast_root(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in RAM where there is one: for tests that open hundreds of stores and need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as path:
        yield Path(path)
