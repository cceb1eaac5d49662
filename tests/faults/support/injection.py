"""Making calls of the operating system fail, through the store's one seam to them."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from lmcache_nvme_backend.store import osio

# Every call that the store makes; it has no fallocate and lists directories by listdir (a scandir inside).
CALLS = (
    "open", "close", "preadv", "pwritev", "pread", "pwrite", "fdatasync", "fadvise_dontneed", "fstat", "lstat",
    "fchmod", "chmod", "rename", "unlink", "mkdir", "rmdir", "listdir", "utime", "flock",
)  # fmt: skip
# What it takes for a store to make a call at all.
SETTINGS = {"fdatasync": {"fsync": "data"}, "fadvise_dontneed": {"direct_io": "off"}}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ESTALE)


class Fault:
    """Makes the N-th call of one function fail, and the later ones too where `for_good`.

    A failing close closes all the same, as the kernel does.
    """

    def __init__(self, monkeypatch: Any, name: str, nth: int, code: int, for_good: bool) -> None:
        self.name, self.nth, self.code, self.for_good = name, nth, code, for_good
        self.count = 0
        self.fired = False
        self.real = getattr(osio, name)
        self.lock = threading.Lock()
        monkeypatch.setattr(osio, name, self)

    def __call__(self, *arguments: Any) -> Any:
        with self.lock:
            self.count += 1
            fire = self.nth and (self.count == self.nth or (self.for_good and self.count > self.nth))
        if fire:
            self.fired = True
            if self.name == "close":
                self.real(*arguments)
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*arguments)

    def stop(self) -> None:
        self.nth = 0
