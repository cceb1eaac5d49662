"""Which of the known layouts a directory holds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store.inspection import StoreTree
from lmcache_nvme_backend.store.layout import VERSION_DIR
from lmcache_nvme_backend.store.vllm_tree import VllmTree

Tree = StoreTree | VllmTree

_ALLOWED = "a directory given as nvme.path to an engine, or as root_dir to vLLM's fs tier"


def find_trees(root: Path) -> list[Tree]:
    """What lies under `root`, one a layout. Raises `ConfigError` where that is neither of them, or cannot be read."""
    try:
        found = root.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError("ROOT", f"{root}, not a directory", _ALLOWED, "Name the directory.")
        path = os.path.realpath(root)
        trees: list[Tree] = []
        if StoreTree.is_at(path):
            trees.append(StoreTree(path))
        if VllmTree.is_at(path):
            trees.append(VllmTree(path))
        if not trees and root.name == VERSION_DIR and StoreTree.is_at(str(Path(path).parent)):
            raise ConfigError("ROOT", f"{root}, the inside of a store", _ALLOWED, f"Name {Path(path).parent}.")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise unreadable(root, error) from None
    if not trees:
        raise ConfigError(
            "ROOT", f"{root}, where neither a store (v1/account) nor a configuration of vLLM's fs tier lies", _ALLOWED,
            "Name the directory itself, not one above or below it.",
        )  # fmt: skip
    return trees


def unreadable(root: Path, error: Exception) -> ConfigError:
    """What to say where the system refuses a look."""
    reason = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None) or root
    return ConfigError("ROOT", f"{where}: {reason}", _ALLOWED, "Name one that exists, as a user who may read it.")
