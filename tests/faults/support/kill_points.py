"""Places in a store's work where a process stops, to be killed there: hooks around its calls to the system.

They live in the process that dies and in no product code. A process that reaches its point says so and waits.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

from lmcache_nvme_backend.store import osio
from lmcache_nvme_backend.store.format import parse_name
from tests.faults.support.record import Did, Record
from tests.faults.support.workload import NAMESPACES

# The name of each point, and whether it is met while the store works (or only at open or close).
POINTS: Final = (
    "at random", "in recovery, at random", "in a write", "after the write", "before the rename",
    "between rename and index", "between index and account", "in the account's write", "in eviction, before the unlink",
    "in eviction, after the unlink", "in a load", "in recovery", "in close",
)  # fmt: skip
_EVERY_CALL: Final = (
    "open", "close", "preadv", "pwritev", "pread", "pwrite", "fstat", "lstat", "fchmod", "chmod", "rename", "unlink",
    "mkdir", "listdir", "utime", "flock",
)  # fmt: skip
_WHICH: Final = {namespace.digest: number for number, namespace in enumerate(NAMESPACES)}


def _chunk_of(path: str) -> tuple[int, bytes] | None:
    directory, _, name = path.rpartition("/")
    parsed = parse_name(name)
    digest = directory.rsplit("/", 2)[-2] if directory.count("/") >= 2 else ""
    return (_WHICH[digest], parsed[0]) if parsed is not None and digest in _WHICH else None


def record_renames(record: Record) -> None:
    """Write down what gets and loses its name, from inside the root's lock."""
    rename, unlink = osio.rename, osio.unlink

    def renaming(source: str, target: str) -> None:
        chunk = _chunk_of(target)
        if chunk is not None:
            record.append(Did.RENAMING, *chunk)
        rename(source, target)
        if chunk is not None:
            record.append(Did.RENAMED, *chunk)

    def unlinking(path: str) -> None:
        chunk = _chunk_of(path)
        if chunk is not None:
            record.append(Did.UNLINKING, *chunk)
        unlink(path)
        if chunk is not None:
            record.append(Did.UNLINKED, *chunk)

    osio.rename, osio.unlink = renaming, unlinking


class KillPoint:
    """Armed once: the N-th time that the process comes by, it stops."""

    def __init__(self, name: str, chance: random.Random, signal_fd: int) -> None:
        self.name = name
        self._left = chance.randrange(1, 12)
        self._calls_left = chance.randrange(1, 100)
        self._signal_fd = signal_fd
        self._temporaries: set[int] = set()

    def stop(self) -> None:
        """For good: whoever reads the pipe kills this process now."""
        os.write(self._signal_fd, b"!")
        while True:
            time.sleep(60)

    def _pass(self) -> None:
        self._left -= 1
        if not self._left:
            self.stop()

    def arm_before_open(self) -> None:
        if self.name == "in recovery":
            self._arm_every_call()
        elif self.name in ("in a write", "after the write"):
            self._arm_write()
        elif self.name in ("before the rename", "between rename and index"):
            self._wrap("rename", lambda _, path: path.endswith(".kv"), after=self.name != "before the rename")
        elif self.name.startswith("in eviction"):
            self._wrap("unlink", lambda path: path.endswith(".kv"), after=self.name.endswith("after the unlink"))
        elif self.name == "in a load":
            self._wrap("preadv", lambda *_: True, after=True)
        elif self.name in ("between index and account", "in the account's write"):
            self._arm_account()

    def opened(self) -> None:
        """In recovery, but it has ended before the N-th call."""
        if self.name == "in recovery":
            self.stop()

    def arm_before_close(self) -> None:
        self._arm_every_call()

    def _wrap(self, call: str, applies: Callable[..., bool], after: bool) -> None:
        real = getattr(osio, call)

        def hooked(*arguments: Any) -> Any:
            if not after and applies(*arguments):
                self._pass()
            result = real(*arguments)
            if after and applies(*arguments):
                self._pass()
            return result

        setattr(osio, call, hooked)

    def _arm_every_call(self) -> None:
        def hook(real: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*arguments: Any) -> Any:
                self._calls_left -= 1
                if not self._calls_left:
                    self.stop()
                return real(*arguments)

            return hooked

        for call in _EVERY_CALL:
            setattr(osio, call, hook(getattr(osio, call)))

    def _arm_write(self) -> None:
        opened, write = osio.open, osio.pwritev

        def opening(path: str, flags: int, mode: int = 0o600) -> int:
            fd = opened(path, flags, mode)
            (self._temporaries.add if "/v1/temp/" in path else self._temporaries.discard)(fd)
            return fd

        def writing(fd: int, buffers: Any, offset: int) -> int:
            if fd not in self._temporaries:
                return write(fd, buffers, offset)
            self._left -= 1
            if not self._left:
                if self.name == "in a write":
                    write(fd, buffers[:1], offset)
                else:
                    osio.pwritev = write
                    osio.write_fully(fd, buffers, offset)
                self.stop()
            return write(fd, buffers, offset)

        osio.open, osio.pwritev = opening, writing

    def _arm_account(self) -> None:
        rename, write = osio.rename, osio.pwrite
        renamed = False

        def renaming(source: str, target: str) -> None:
            nonlocal renamed
            rename(source, target)
            renamed = "/v1/temp/" in source and target.endswith(".kv")

        def writing(fd: int, data: bytes, offset: int) -> int:
            nonlocal renamed
            if renamed:  # the first write after a publication: the session's record or the account's figures
                renamed = False
                self._left -= 1
                if not self._left:
                    if self.name == "in the account's write":
                        write(fd, data[: len(data) // 2], offset)
                    self.stop()
            return write(fd, data, offset)

        osio.rename, osio.pwrite = renaming, writing
