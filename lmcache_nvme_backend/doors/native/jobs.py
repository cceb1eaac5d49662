"""vLLM's jobs of one direction, from when they are handed in until they are reported."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class _Numbered(Protocol):
    job_id: int


Job = TypeVar("Job", bound=_Numbered)


class Jobs(Generic[Job]):
    """Any thread may end a job; all else is for one thread, the engine's.

    `changed` is notified of each that ends, so with it held one can wait for a job to be over.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._open: dict[int, Job] = {}
        self._over: deque[Job] = deque()

    def __iter__(self) -> Iterator[Job]:
        """All that are not reported yet."""
        return iter(list(self._open.values()))

    def add(self, job: Job) -> None:
        self._open[job.job_id] = job

    def end(self, job: Job) -> None:
        """Once a job: nothing of it touches the device from now on."""
        with self._changed:
            self._over.append(job)
            self._changed.notify_all()

    def is_over(self, job: Job) -> bool:
        return job in self._over

    def report(self) -> list[Job]:
        """Those that are over since the last call."""
        with self._changed:
            done = list(self._over)
            self._over.clear()
            for job in done:
                del self._open[job.job_id]
        return done

    def named(self, job_ids: Iterable[int]) -> list[Job]:
        """Those of these that are not reported yet."""
        return [job for job_id in job_ids if (job := self._open.get(job_id)) is not None]

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def any_over(self) -> bool:
        return bool(self._over)
