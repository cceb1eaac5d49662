"""Nothing outside a root may be read, written or removed: a look at every path that the store uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmcache_nvme_backend.store import osio


class Fence:
    """While installed, notes each call that reaches a place outside the root, through whichever link."""

    def __init__(self, monkeypatch: Any, root: Path) -> None:
        self._root = os.path.realpath(root)
        self.escapes: list[str] = []
        opened = osio.open

        def opening(path: str, flags: int, mode: int = 0o600) -> int:
            fd = opened(path, flags, mode)
            self._check("open", str(Path(f"/proc/self/fd/{fd}").readlink()))
            return fd

        monkeypatch.setattr(osio, "open", opening)
        for call in ("rename", "unlink", "mkdir", "rmdir", "utime"):
            monkeypatch.setattr(osio, call, self._on_name(call, getattr(osio, call)))
        for call in ("listdir", "chmod"):
            monkeypatch.setattr(osio, call, self._on_target(call, getattr(osio, call)))

    def _on_name(self, call: str, real: Any) -> Any:
        """A call that works on a name and follows no link there, but those on the way to it."""

        def fenced(*arguments: Any) -> Any:
            result = real(*arguments)
            for path in arguments:
                if isinstance(path, str):
                    self._check(call, os.path.join(os.path.realpath(os.path.dirname(path)), "x"))  # noqa: PTH118, PTH120
            return result

        return fenced

    def _on_target(self, call: str, real: Any) -> Any:
        def fenced(path: str, *rest: Any) -> Any:
            result = real(path, *rest)
            self._check(call, os.path.realpath(path))
            return result

        return fenced

    def _check(self, call: str, path: str) -> None:
        if path != self._root and not path.startswith(self._root + "/"):
            self.escapes.append(f"{call} {path}")


def snapshot(directory: Path) -> dict[str, Any]:
    """Names, contents and times of everything below a directory."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found
