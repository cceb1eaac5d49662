"""Other releases, to be put first on PYTHONPATH over the one environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"  # Where `make overlays` puts them.
VERSIONS = ("0.5.4", "0.5.5")
# The proxy of this release starts over the installed one's companions; `litellm[proxy]` asks for packages of its own.
LITELLM = ("1.110.2", ("litellm==1.110.2", "semver==3.1.2"))


def lmcache_overlay(version: str) -> Path:
    """The folder of that release, fetched where `make overlays` has not done it. Raises CalledProcessError."""
    return _overlay("lmcache", version, [f"lmcache=={version}"])


def litellm_overlay() -> Path:
    """The folder of the newest LiteLLM that was looked at, fetched where it is missing. Raises CalledProcessError."""
    version, requirements = LITELLM
    return _overlay("litellm", version, list(requirements))


def _overlay(name: str, version: str, requirements: list[str]) -> Path:
    folder = CACHE / name / version
    if not folder.is_dir():
        subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "fetch_release.py"), str(folder), *requirements], check=True
        )
    return folder
