"""Other releases of LMCache, to be put first on PYTHONPATH over the one environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "lmcache"  # Where `make overlays` puts them.
VERSIONS = ("0.5.4", "0.5.5")


def lmcache_overlay(version: str) -> Path:
    """The folder of that release, fetched where `make overlays` has not done it. Raises CalledProcessError."""
    if not (FOLDER / version).is_dir():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "fetch_lmcache.py"), str(FOLDER), version], check=True)
    return FOLDER / version
