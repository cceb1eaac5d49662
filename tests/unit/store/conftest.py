"""Fixtures of the store's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.Popen[str]"]

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory for a store, on a disk where the machine's temporary directory is on one."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def ram_root() -> Iterator[Path]:
    """An empty directory on tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def fast_root(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in RAM where there is one: for tests that open hundreds of stores and need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as path:
        yield Path(path)


@pytest.fixture
def start_child() -> Iterator[Start]:
    """Start Python processes that run a program with `root` and further arguments in sys.argv; all end with the test.

    A program talks by lines: it prints, and reads what the test writes to its stdin.
    """
    children: list[subprocess.Popen[str]] = []

    def start(program: str, root: Path, *arguments: object) -> subprocess.Popen[str]:
        preamble = (
            "import os, sys, time\nfrom pathlib import Path\nfrom store_helpers import *\n"
            "from lmcache_nvme_backend.store import *\nroot = Path(sys.argv[1])\n"
            "def say(*words): print(*words, flush=True)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", preamble + program, str(root), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), str(HERE)])},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()
