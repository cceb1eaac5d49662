"""What goes wrong with the directory while the engine serves."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.soak.mount import SmallDisk

# Seconds between two damaged chunks, and how long and how often the disk is full or read-only.
DAMAGE_EVERY_S = 0.5
OUTAGE_EVERY_S, OUTAGE_S = 12.0, 4.0


class Faults:
    """A thread that damages chunks all the time and takes the disk away now and then, from a seed."""

    def __init__(self, root: Path, disk: SmallDisk | None, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._root, self._disk, self._random = root, disk, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Faults:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        outages = [self._full_disk, self._read_only] if self._disk is not None else []
        waited = 0.0
        while not self._stop.wait(DAMAGE_EVERY_S):
            waited += DAMAGE_EVERY_S
            if outages and waited > OUTAGE_EVERY_S:
                waited = 0.0
                outages.append(outages.pop(0))
                outages[-1]()
            else:
                self._damage_one()

    def _damage_one(self) -> None:
        damage = self._random.choices(
            [self._remove, self._truncate, self._flip, self._swap, self._remove_shard], weights=[4, 4, 4, 2, 1]
        )[0]
        with suppress(OSError):  # evicted meanwhile
            chunks = sorted(self._root.glob("v1/*/*/*.kv"), key=lambda path: path.stat().st_mtime)[-40:]
            if len(chunks) > 1:
                damage(*self._random.sample(chunks, 2))
                self.done[damage.__name__.strip("_")] += 1

    def _remove(self, path: Path, _: Path) -> None:
        path.unlink()

    def _truncate(self, path: Path, _: Path) -> None:
        os.truncate(path, self._random.randrange(path.stat().st_size))

    def _flip(self, path: Path, _: Path) -> None:
        with path.open("r+b") as file:
            at = self._random.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._random.randrange(8)]))

    def _swap(self, path: Path, other: Path) -> None:
        aside = path.with_suffix(".aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)

    def _remove_shard(self, path: Path, _: Path) -> None:
        shutil.rmtree(path.parent)

    def _full_disk(self) -> None:
        assert self._disk is not None
        with self._disk.filled():
            self.done["full disk"] += 1
            self._stop.wait(OUTAGE_S)

    def _read_only(self) -> None:
        assert self._disk is not None
        with self._disk.read_only():
            self.done["read-only"] += 1
            self._stop.wait(OUTAGE_S)
