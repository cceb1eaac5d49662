"""Threads and processes that do everything to the same chunks at once, and a `close` in the middle of it.

    python -m tests.faults.stress --seconds 60

Processes, each with threads that switch as often as the interpreter can, store, load, pin and remove the chunks of two
namespaces under a quota that holds a fifth of them, so that something is evicted all the time, also while it is read.
Every second or so each closes its store under its threads and opens another one; one of the processes keeps snapshots
and lists by threads, as for thousands of chunks. Every load is compared with what
belongs under its key; the disk is weighed all along; in the end a fresh store looks at what is left. Prints what
happened; the exit status is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

from lmcache_nvme_backend.store import ChunkStore, MissCause, PutResult, upkeep
from lmcache_nvme_backend.store.format import BLOCK
from tests.faults.support.record import Did, Record
from tests.faults.support.verify import Broken, verify
from tests.faults.support.workload import NAMESPACES, QUOTA, Workload, random_settings, small_counts_as_large
from tests.unit.store.store_helpers import disk_bytes, temporaries

THREADS = 6
SWITCH_INTERVAL_S = 1e-6
SEED = 7


class Tally(Counter[str]):
    """What threads have done; takes the place of a record where nobody is killed."""

    def __init__(self) -> None:
        super().__init__()
        self._mutex = threading.Lock()

    def append(self, did: Did, which: int, key: bytes) -> None:
        with self._mutex:
            self[did.name.lower()] += 1


class Process:
    """The threads of one process, over several lives of its store."""

    def __init__(self, root: Path, codec: str, number: int, deadline: float) -> None:
        self._root, self._codec, self._deadline = root, codec, deadline
        self._chance = random.Random(number)
        self._large = number % 2 == 1
        self._errors: list[str] = []
        self.tally = Tally()

    def run(self) -> Counter[str]:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if self._large:
            small_counts_as_large()
            upkeep.UPKEEP_INTERVAL_S = upkeep.SNAPSHOT_INTERVAL_S = 0.05
        total: Counter[str] = Counter()
        while time.monotonic() < self._deadline and not self._errors:
            total += self._one_life()
        for did in ("loaded", "wrong"):
            total[did] += self.tally[did]
        total["errors"] = len(self._errors)
        for text in self._errors[:3]:
            print(text, file=sys.stderr)
        return total

    def _one_life(self) -> Counter[str]:
        which = self._chance.randrange(2)
        store = ChunkStore.open(self._root, NAMESPACES[which], random_settings(self._chance, self._codec))
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._work, args=(store, which, self._chance.random(), stop))
            for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, min(self._chance.uniform(0.5, 2.0), self._deadline - time.monotonic())))
        store.close()  # in the middle of everything
        self._check_closed(store)
        stop.set()
        for thread in threads:
            thread.join()
        if store._index._pins:
            self._errors.append(f"pins are left: {store._index._pins}")
        stats = store.stats
        return Counter(
            lives=1,
            stored=stats.stores,
            hits=stats.hits,
            evictions=stats.evictions,
            corrupt=sum(stats.corrupt.values()),
            io_errors=stats.misses[MissCause.IO_ERROR] + stats.puts[PutResult.IO_ERROR],
            refused_by_close=stats.misses[MissCause.CLOSED] + stats.puts[PutResult.CLOSED],
            dropped=sum(count for result, count in stats.drops.items() if result is not PutResult.CLOSED),
        )

    def _work(self, store: ChunkStore, which: int, seed: float, stop: threading.Event) -> None:
        try:
            workload = Workload(SEED, which, store, self.tally, random.Random(seed))  # type: ignore[arg-type]
            while not stop.is_set():
                workload.turn()
        except BaseException:
            self._errors.append(traceback.format_exc())

    def _check_closed(self, store: ChunkStore) -> None:
        if os.access(store._session.path, os.F_OK):
            self._errors.append("a closed store left its session")


def weigh(root: Path) -> int:
    """Bytes on the disk; a sum above the quota is looked at again with the lock held, since a file that moves between
    two looks can be counted twice, and without the single blocks by which an open tries direct I/O."""
    found = disk_bytes(root)
    if found > QUOTA:
        with (root / "v1" / "account").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            probes = sum(size_of(path) == BLOCK for path in temporaries(root))
            found = disk_bytes(root) - probes * BLOCK
    return found


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def run(root: Path, seconds: float, processes: int, codec: str) -> Counter[str]:
    deadline = time.monotonic() + seconds
    pipes, pids = [], []
    for number in range(processes):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, json.dumps(Process(root, codec, number, deadline).run()).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    total: Counter[str] = Counter(over_quota=0, looks=0)
    while time.monotonic() < deadline:
        if (root / "v1" / "account").exists():
            total["looks"] += 1
            total["over_quota"] += weigh(root) > QUOTA
        time.sleep(0.02)
    for pid, pipe in zip(pids, pipes):
        said = os.read(pipe, 1 << 16)
        os.waitpid(pid, 0)
        os.close(pipe)
        total += Counter(json.loads(said) if said else {"errors": 1})
    try:
        verify(root, SEED, found := Record())
        total["found_at_the_end"] = found.count(Did.FOUND)
    except Broken as broken:
        print(broken, file=sys.stderr)
        total["errors"] += 1
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--codec", choices=("none", "zstd"), default="none")
    parser.add_argument("--directory", type=Path, default=None, help="where the root is made; a temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        total = run(Path(directory), options.seconds, options.processes, options.codec)
    figures = {
        name: total[name]
        for name in (
            "lives", "stored", "hits", "evictions", "dropped", "refused_by_close", "found_at_the_end", "looks",
            "wrong", "corrupt", "io_errors", "over_quota", "errors",
        )
    }  # fmt: skip
    if options.json:
        print(json.dumps(figures))
    else:
        print("  ".join(f"{name.replace('_', ' ')} {figure}" for name, figure in figures.items()))
    return 1 if any(figures[name] for name in ("wrong", "corrupt", "io_errors", "over_quota", "errors")) else 0


if __name__ == "__main__":
    sys.exit(main())
