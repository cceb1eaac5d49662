"""The cache directory and folders in it that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmcache_nvme_backend.errors import ConfigError


def cache_dir() -> Path:
    """`$KVTIER_CACHE_DIR`, else `kvtier` in `$XDG_CACHE_HOME`, else `~/.cache/kvtier`; made where it is missing."""
    if own := os.environ.get("KVTIER_CACHE_DIR"):
        path = Path(own).expanduser()
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtier"
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "KVTIER_CACHE_DIR", f"{path} ({error.strerror})", "a directory one may write to", "Name another one."
        ) from None
    return path


def require_space(path: Path, needed: int, purpose: str) -> None:
    """Raise ConfigError where the disk under `path` has less than `needed` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise ConfigError(
            "KVTIER_CACHE_DIR",
            f"{free / 1e9:.1f} GB free under {path}",
            f"at least {needed / 1e9:.1f} GB for {purpose}",
            "Free some space or name a directory on another disk.",
        )


@contextmanager
def _locked(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `lock`; it is gone with the process that held it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_once(target: Path, build: Callable[[Path], None], on_wait: Callable[[], None] = lambda: None) -> Path:
    """`target`, built by `build(temporary folder)` where it is missing.

    Two processes at once build it once: the second calls `on_wait` and waits. An interrupted build leaves no folder
    that looks finished, and what it did leave is removed by the next.
    """
    if target.is_dir():
        return target
    with _locked(target.with_name(f".{target.name}.lock"), on_wait):
        if target.is_dir():
            return target
        prefix = f".{target.name}.part-"
        for stale in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(part)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target
