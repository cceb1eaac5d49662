"""Four processes with one namespace, of which one after the other is killed: in a put, in an eviction, anywhere.

    python -m tests.faults.neighbours --kills 100

Each process stores, loads and removes the same prefixes under a quota that holds a third of them; what one of them
loads was stored by any. Before each kill a victim is stopped where it is to die while the others go on. Afterwards
all rest, and each survivor is asked for every prefix: it has to load what lies on the disk, whoever stored it and
whether or not that one lives, with the right bytes, without having been told; the killed one's place is taken by a
new process. The disk is weighed all along. Prints what happened; the exit status is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lmcache_nvme_backend.store import ChunkStore, Hit, osio
from lmcache_nvme_backend.store.format import parse_name
from tests.faults.stress import Tally, weigh
from tests.faults.support.record import Record, descriptor_free
from tests.faults.support.verify import Broken, verify
from tests.faults.support.workload import (
    LARGEST,
    NAMESPACES,
    PREFIXES,
    QUOTA,
    Workload,
    aligned,
    chunk_files,
    payload,
    random_settings,
    small_counts_as_large,
)

PROJECT = Path(__file__).parents[2]
PROCESSES: Final = 4
SEED: Final = 11
TURNS: Final = 12
# Where a victim stops: (call of the operating system, whether it has been made).
POINTS: Final[dict[str, tuple[str, bool] | None]] = {
    "in a put": ("pwritev", True),
    "before the rename": ("rename", False),
    "after the rename": ("rename", True),
    "before an unlink": ("unlink", False),
    "after an unlink": ("unlink", True),
    "anywhere": None,
}
STUCK_S: Final = 60.0


# --- one process


def stop_at(call: str, made: bool) -> None:
    """From now on the first such call on a chunk or its temporary stops this process, and says so."""
    real: Callable[..., Any] = getattr(osio, call)

    def stopping(first: Any, *rest: Any) -> Any:
        if call == "pwritev" or str(first).endswith(".kv") or "/temp/" in str(first):
            if made:
                real(first, *rest)
            print(json.dumps("stopped"), flush=True)
            time.sleep(STUCK_S)
            os._exit(1)
        return real(first, *rest)

    setattr(osio, call, stopping)


def find(store: ChunkStore) -> list[tuple[int, int, bool]]:
    """Of each prefix: how many chunks a lookup promises, how many of them load, and whether all those were right."""
    found = []
    into = aligned(bytes(LARGEST))
    for keys in PREFIXES:
        promised, loaded, right = store.match(keys), 0, True
        for key in keys[:promised]:
            result = store.get(key, into)
            if not isinstance(result, Hit):
                break
            loaded += 1
            right = right and bytes(into[: result.nbytes]) == payload(SEED, 0, key)
        found.append((promised, loaded, right))
    return found


def work(root: Path, seed: int, codec: str) -> None:
    """Obey lines on stdin: `turns`, `find`, `die POINT`, `end`; each answers with a line of JSON."""
    chance = random.Random(seed)
    if seed % 2:
        small_counts_as_large()
    tally = Tally()
    store = ChunkStore.open(root, NAMESPACES[0], random_settings(chance, codec))
    workload = Workload(SEED, 0, store, tally, chance)  # type: ignore[arg-type]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        match line.strip().split(" ", 1):
            case ["turns"]:
                for _ in range(TURNS):
                    workload.turn()
                print(json.dumps(tally), flush=True)
            case ["find"]:
                print(json.dumps(find(store)), flush=True)
            case ["die", point]:
                if (where := POINTS[point]) is not None:
                    stop_at(*where)
                else:
                    print(json.dumps("stopped"), flush=True)
                while True:
                    workload.turn()
            case _:
                break
    stats = store.stats
    store.close()
    print(json.dumps({"evictions": stats.evictions, "corrupt": sum(stats.corrupt.values())}), flush=True)


# --- those who watch it


class Neighbour:
    """One of the processes."""

    def __init__(self, root: Path, seed: int, codec: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.neighbours", "--work", str(seed), "--directory", str(root),
             "--codec", codec],
            cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, sys.path)])},
        )  # fmt: skip

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next line; raises where the process ends or hangs instead."""
        assert self._process.stdout is not None
        timer = threading.Timer(STUCK_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise Broken("other", "a process ended, or hung")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Neighbourhood:
    """All of them, and what they did."""

    def __init__(self, root: Path, seed: int, codec: str) -> None:
        self._root, self._codec = root, codec
        self._chance = random.Random(seed)
        self.total: Counter[str] = Counter(kills=0, found=0, promised_too_much=0, wrong=0, over_quota=0, looks=0)
        self._processes = [self._start() for _ in range(PROCESSES)]
        for process in self._processes:
            process.answer()

    def _start(self) -> Neighbour:
        return Neighbour(self._root, self._chance.randrange(2**32), self._codec)

    def kill_one(self, point: str) -> None:
        """Kill one there while the others work, then see what the others find."""
        victim = self._processes.pop(self._chance.randrange(PROCESSES))
        newcomer = self._start()
        victim.say(f"die {point}")
        for process in self._processes:
            process.say("turns")
        victim.answer()
        if POINTS[point] is None:
            time.sleep(self._chance.uniform(0, 0.05))
        self._weigh()
        victim.kill()
        for process in self._processes:
            self.total["wrong"] += process.answer().get("wrong", 0)
        self._weigh()
        self.total["kills"] += 1
        newcomer.answer()
        self._processes.append(newcomer)
        self.look()

    def _weigh(self) -> None:
        self.total["looks"] += 1
        self.total["over_quota"] += weigh(self._root) > QUOTA

    def look(self) -> None:
        """Everybody rests: each finds what is there."""
        there = {parsed[0] for path in chunk_files(self._root) if (parsed := parse_name(path.name)) is not None}
        wanted = [next((i for i, key in enumerate(keys) if key not in there), len(keys)) for keys in PREFIXES]
        for process in self._processes:
            process.say("find")
        for process in self._processes:
            for number, (promised, loaded, right) in enumerate(process.answer()):
                self.total["found"] += loaded
                self.total["wrong"] += not right
                self.total["promised_too_much"] += promised > loaded
                if loaded != wanted[number]:
                    raise Broken("other", f"{loaded} chunks of prefix {number} load where {wanted[number]} lie")

    def end(self) -> None:
        for process in self._processes:
            process.say("end")
        for process in self._processes:
            self.total.update(process.answer())
            process.kill()
        if not descriptor_free(str(self._root / "v1" / "account")):
            raise Broken("other", "the root's lock is held")
        verify(self._root, SEED, Record())

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()


def run(root: Path, kills: int, seed: int, codec: str) -> Counter[str]:
    """Raises `Broken` at the first promise that was not kept, but counts wrong bytes and looks above the quota."""
    neighbourhood = Neighbourhood(root, seed, codec)
    try:
        points: list[str] = []
        for _ in range(kills):
            points = points or random.Random(seed).sample(sorted(POINTS), len(POINTS))
            neighbourhood.kill_one(points.pop())
        neighbourhood.end()
    finally:
        neighbourhood.kill_all()
    return neighbourhood.total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--codec", choices=("none", "zstd"), default="none")
    parser.add_argument("--directory", type=Path, default=None, help="where the root is made; a temporary directory")
    parser.add_argument("--work", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.directory, options.work, options.codec)
        return 0
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        try:
            total = run(Path(directory), options.kills, seed, options.codec)
        except Broken as broken:
            print(f"seed {seed}: {broken}", file=sys.stderr)
            return 1
    print("  ".join(f"{name.replace('_', ' ')} {figure}" for name, figure in total.items()))
    print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    return 1 if total["wrong"] or total["over_quota"] or total["corrupt"] else 0


if __name__ == "__main__":
    sys.exit(main())
