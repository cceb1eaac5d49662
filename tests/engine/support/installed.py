"""The package's entry points for engines started from a checkout."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def python_path(folder: Path) -> str:
    """A PYTHONPATH on which the packages of this checkout lie, and vLLM finds their plugin.

    vLLM finds plugins by installed metadata; where the project is not installed, `folder` gets metadata that names
    the same entry point.
    """
    paths = [str(ROOT), str(ROOT / "configs"), str(ROOT / "patches")]
    if not any(point.name == "lmcache_nvme_backend" for point in entry_points(group="vllm.general_plugins")):
        info = folder / "lmcache_nvme_backend-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-nvme-backend\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nlmcache_nvme_backend = lmcache_nvme_backend.doors.vllm_plugin:register\n"
        )
        paths.insert(0, str(folder))
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
