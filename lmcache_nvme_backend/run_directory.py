"""One temporary directory for an engine's life, made by its front process before it starts its children.

It holds what the children tell the front: their metrics, and why a start was refused. A front that is killed cannot
remove it, so the next one sweeps those whose lock nobody holds.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "KVTIER_RUN_DIR"
_PREFIX = "kvtier-run-"
_held: list[int] = []


def run_directory() -> Path | None:
    """The directory, as the environment names it; ``None`` where no front process made one."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path and Path(path).is_dir() else None


def make_run_directory() -> Path:
    """In the front process: make the directory and name it in the environment, for this process and its children."""
    if (existing := run_directory()) is not None:
        return existing
    _sweep()
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    # Locked under another name first: a sweep takes a directory by its "lock", which is there only when it is held.
    lock = os.open(path / "locking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / "locking").rename(path / "lock")
    _held.append(lock)
    os.environ[VARIABLE] = str(path)
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _sweep() -> None:
    for stale in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(stale / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(lock)
