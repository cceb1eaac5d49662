"""Counters by cause, from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

# The cause of what is not stored because something before it in its prefix was not.
PREFIX_LOST: Final = "prefix lost"


class Counts:
    """Named counts; what was never counted is absent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def total(self) -> int:
        with self._lock:
            return self._counts.total()
