"""Stepping aside from a disk that fails: a tier whose every call ends in an I/O error only costs the engine time."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal

from lmcache_nvme_backend.store import osio

Operation = Literal["read", "write"]

# Errors of one kind in a row that open it. One bad sector fails the load of one chunk, and other chunks load between;
# a request loads tens of chunks, so a dead disk costs one request at most.
ERRORS_TO_OPEN: Final = 8
# A first probe comes this soon after the last error, each further one after twice the time, up to the second figure:
# a disk that was reset is back in seconds, and one that works for a probe and fails for the work is not asked all day.
PROBE_AFTER_S: Final = 2.0
PROBE_AFTER_MOST_S: Final = 60.0
# After this long in service a new failure is a new story, and is probed early again.
SETTLED_S: Final = 300.0

# These tell of a name in the directory, not of the disk; a full disk is handled by eviction.
_NOT_THE_DISK: Final = frozenset(
    (
        errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP, *osio.FULL,
    )
)  # fmt: skip

# Under vLLM's logger, whose handlers print what the tier says in the engine's log.
logger = logging.getLogger("vllm.lmcache_nvme_backend.store")


class Breaker:
    """Counts I/O errors in a row, of reads and writes apart: a disk that turned read-only still reads.

    While `open` is true nobody asks the disk for anything but `try_again`, which its owner calls now and then. Every
    method may be called from any thread; `open` and `worked` cost one attribute read where nothing is wrong.
    """

    def __init__(self, where: str, probe: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`probe` uses the disk as the tier does, and raises `OSError` where that fails; `where` is for the log."""
        self.open = False
        self._where = where
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._errors: dict[Operation, int] = {"read": 0, "write": 0}
        self._wait_s = PROBE_AFTER_S
        self._probe_at = 0.0
        self._opened_at = 0.0
        self._closed_at = float("-inf")

    def worked(self, operation: Operation) -> None:
        """A chunk was read or written."""
        if self._errors[operation]:
            with self._lock:
                self._errors[operation] = 0

    def failed(self, operation: Operation, error: OSError) -> None:
        """A chunk could not be read or written for this error."""
        if error.errno in _NOT_THE_DISK or self.open:
            return
        with self._lock:
            self._errors[operation] += 1
            if self.open or self._errors[operation] < ERRORS_TO_OPEN:
                return
            now = self._clock()
            if now - self._closed_at > SETTLED_S:
                self._wait_s = PROBE_AFTER_S
            self._opened_at, self._probe_at = now, now + self._wait_s
            self.open = True
        logger.error(
            "lmcache_nvme_backend: the NVMe tier steps aside after %d I/O errors in a row (the last, of a %s: %s) "
            "under %s: lookups find nothing and nothing is stored until the disk works again.",
            ERRORS_TO_OPEN, operation, error, self._where,
        )  # fmt: skip

    def try_again(self) -> None:
        """Probe the disk where that is due, and take up service again where it works."""
        if not self.open or self._clock() < self._probe_at or not self._probing.acquire(blocking=False):
            return
        try:
            try:
                self._probe()
            except OSError:
                self._wait_s = min(2 * self._wait_s, PROBE_AFTER_MOST_S)
                self._probe_at = self._clock() + self._wait_s
                return
            self._wait_s = min(2 * self._wait_s, PROBE_AFTER_MOST_S)
            with self._lock:
                self._errors = {"read": 0, "write": 0}
                self._closed_at = self._clock()
                self.open = False
        finally:
            self._probing.release()
        logger.warning(
            "lmcache_nvme_backend: the NVMe tier under %s works again and serves, after %.0f s.",
            self._where, self._closed_at - self._opened_at,
        )  # fmt: skip
