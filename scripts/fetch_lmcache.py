"""Unpack releases of LMCache beside the installed one: `python scripts/fetch_lmcache.py FOLDER VERSION...`.

The integration tests put FOLDER/VERSION first on PYTHONPATH: an overlay over the one environment. Each release is
fetched once (some 20 MB), and a folder that is there is whole.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def fetch(folder: Path, version: str) -> Path:
    """The folder of that release, fetched where it is missing. Raises CalledProcessError with pip's output printed."""
    target = folder / version
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching LMCache {version}, once (20 MB) …", flush=True)
    part = Path(tempfile.mkdtemp(prefix=f".{version}.part-", dir=folder))
    try:
        command = [sys.executable, "-m", "pip", "--no-input", "-q", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(part / "wheel"), f"lmcache=={version}"], check=True)
        (wheel,) = (part / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part / "unpacked")
        try:
            (part / "unpacked").rename(target)
        except OSError:
            if not target.is_dir():  # Another process was quicker: its folder is as good.
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        fetch(Path(sys.argv[1]).absolute(), wanted)
