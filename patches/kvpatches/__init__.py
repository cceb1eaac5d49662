"""Upstream fixes, carried safely: whether the installed vLLM needs them, applied atomically, taken back exactly.

Nothing but the standard library, so that a container's start script can run `python -m kvpatches apply` with vLLM's own
interpreter. Patches are the folders of `catalog_dir()`.
"""

from kvpatches.catalog import Patch, catalog, catalog_dir, get
from kvpatches.errors import ConfigError, Exit, NotInstalled, UnknownCode
from kvpatches.in_process import Adaptation, adaptations
from kvpatches.judge import State
from kvpatches.tool import Outcome, PatchStatus, apply, diff, revert, status

__all__ = [
    "Adaptation",
    "ConfigError",
    "Exit",
    "NotInstalled",
    "Outcome",
    "Patch",
    "PatchStatus",
    "State",
    "UnknownCode",
    "adaptations",
    "apply",
    "catalog",
    "catalog_dir",
    "diff",
    "get",
    "revert",
    "status",
]
