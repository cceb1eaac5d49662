"""What an engine's processes hold: resident memory, descriptors and threads, over time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

# The engine's own caches fill within this part of the run; what comes after is compared.
WARM_UP = 0.25


class Held(msgspec.Struct, frozen=True):
    """By all processes together, at one moment."""

    memory: int  # bytes, each shared page divided by those who share it
    descriptors: int
    threads: int


class Resources:
    """A context: samples what an engine's processes hold, once a second."""

    def __init__(self, processes: Callable[[], list[int]]) -> None:
        self._processes, self._samples = processes, [held(processes())]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Resources:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            self._samples.append(held(self._processes()))

    def growth(self, what: str, parts: int = 1) -> list[float]:
        """From the end of the warm-up to the end, in each of so many parts of that time."""
        start = int(len(self._samples) * WARM_UP)
        few = max(1, len(self._samples) // 20)
        values = [getattr(sample, what) for sample in self._samples]
        last = max(start, len(values) - few)
        at = [start + (last - start) * part // parts for part in range(parts + 1)]
        means = [sum(values[i : i + few]) / len(values[i : i + few]) for i in at]
        return [after - before for before, after in pairwise(means)]


def held(pids: list[int]) -> Held:
    """Of processes, some of which may have ended."""
    memory = descriptors = threads = 0
    for pid in pids:
        process = Path(f"/proc/{pid}")
        try:
            rollup = (process / "smaps_rollup").read_text()
            descriptors += len(list((process / "fd").iterdir()))
            threads += len(list((process / "task").iterdir()))
        except OSError:
            continue
        memory += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return Held(memory, descriptors, threads)
