"""An NVMe tier for KV chunks that survives an engine restart and needs no CPU cache.

Importing this package is cheap: the classes that a configuration names are loaded on first use, so that neither torch
nor LMCache is imported before the engine itself asks for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The class a user's configuration names -> the door that defines it.
_DOORS = {
    "NvmeBackend": "lmcache_nvme_backend.doors.lmcache_backend",
    "NvmeL2Adapter": "lmcache_nvme_backend.doors.mp.adapter",
    "NvmeOffloadingConnector": "lmcache_nvme_backend.doors.native.connector",
    "NvmeOffloadingSpec": "lmcache_nvme_backend.doors.native.spec",
    "NvmeTier": "lmcache_nvme_backend.doors.tier.tier",
    "CpuTieringOffloadingSpec": "lmcache_nvme_backend.doors.tier.cpu_spec",
}

__all__ = [
    "CpuTieringOffloadingSpec",
    "NvmeBackend",
    "NvmeL2Adapter",
    "NvmeOffloadingConnector",
    "NvmeOffloadingSpec",
    "NvmeTier",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(import_module(_DOORS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
