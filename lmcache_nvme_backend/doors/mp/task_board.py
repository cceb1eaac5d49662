"""Tasks as LMCache's controllers know them: a number, a result that is taken once, and a descriptor that wakes them."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

Result = TypeVar("Result")

_numbers = itertools.count()


class TaskBoard(Generic[Result]):
    """The tasks of one kind. Any thread may call any method."""

    def __init__(self) -> None:
        self._notifier: Any = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, Result] = {}
        self._closed = False

    @property
    def fd(self) -> int:
        return int(self._notifier.fileno())

    @staticmethod
    def number() -> int:
        return next(_numbers)

    def finish(self, task: int, result: Result) -> None:
        with self._lock:
            if not self._closed:
                self._results[task] = result
                self._notifier.notify()

    def take(self, task: int) -> Result | None:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()
