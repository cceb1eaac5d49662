"""Kill a process that stores, loads and evicts, look at what is left with a fresh one, and again.

    python -m tests.faults.campaign --kills 1000

Each kill: one process (every fourth time two, with one namespace or two) works on a root by a seeded script; it is
killed (SIGKILL) at a random moment or where a hook around the store's system calls has stopped it; where a second
one is there, that goes on, and the account that the two shared has to be the disk's; a fresh process
opens both namespaces and checks every chunk bit for bit, the quota, the account, temporaries, sessions and the lock.
Every second root is treated as those of many thousands of chunks are: snapshots, opens from them, listing by threads.
What must be there and what may be is known from a record that the processes shared. All processes are forks of this
one, which keeps a kill cheap. Prints one table; the exit status is 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lmcache_nvme_backend.store import ChunkStore, upkeep
from tests.faults.support.kill_points import POINTS, KillPoint, record_renames
from tests.faults.support.record import Did, Expected, Record
from tests.faults.support.verify import Broken, account_is_right, look_as_at_a_large_store, verify
from tests.faults.support.workload import NAMESPACES, Workload, random_settings, small_counts_as_large

# A fresh root after so many kills, so that each also sees an empty one, and a failure can be replayed by its seed.
KILLS_A_ROOT = 40
# A process that reaches nothing in this time hangs: a broken promise, too.
STUCK_S = 60.0
RANDOM_KILL_S = 0.04
NEIGHBOUR_TURNS = 3
CODECS = ("none", "zstd")


class Row(msgspec.Struct):
    """What happened at one kind of point, or at all."""

    kills: int = 0
    survivors: int = 0  # chunks that a fresh process found, with the right bytes
    loads: int = 0  # that the processes made and compared before they were killed
    lost_newest: int = 0  # stores on their way at the kill whose chunk is not there
    lost: int = 0  # chunks that had their name before the kill, were not evicted, and are not there
    wrong: int = 0
    over_quota: int = 0
    other: int = 0

    def add(self, other: Row) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def broken(self) -> int:
        return self.lost + self.wrong + self.over_quota + self.other


@dataclass
class Root:
    """One directory that processes are killed on, one after the other."""

    path: Path
    # A store that opens from a snapshot may not know of a chunk yet when it stores that anew, and two codecs would give
    # it two names, of which an open keeps one. So where there are snapshots, all processes have one codec.
    codec: str | None
    expected: Expected = field(default_factory=Expected)

    @property
    def large(self) -> bool:
        return self.codec is not None


class Child:
    """A fork that runs `work(signal_fd)`; its word comes through a pipe."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 3
            try:
                os.close(self._read)
                work(write)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(write)

    def word(self, timeout_s: float) -> bytes:
        """The next byte that it writes; nothing where it ended, or said nothing in that time."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        return os.read(self._read, 1) if ready else b""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._read)
        return os.waitstatus_to_exitcode(status)


class Campaign:
    def __init__(self, seed: int, base: Path) -> None:
        self._seed, self._base = seed, base
        self._chance = random.Random(seed)
        self._record, self._found = Record(), Record()
        self._rest = mmap.mmap(-1, 1)  # not 0: who goes on beside a killed process stops now
        self.rows = {point: Row() for point in POINTS}
        self.complaints: list[str] = []

    def run(self, kills: int, progress: Callable[[int], None]) -> None:
        points: list[str] = []
        for number in range(kills):
            if number % KILLS_A_ROOT == 0:
                large = number // KILLS_A_ROOT % 2 == 1
                root = Root(self._base / f"root{number}", self._chance.choice(CODECS) if large else None)
                root.path.mkdir()
            if not points:
                points = self._chance.sample(POINTS, len(POINTS))
            point = points.pop()
            row = self._one(root, point, number)
            self.rows[point].add(row)
            if row.broken:
                print(f"seed {self._seed}, kill {number} ({point}): {self.complaints[-1]}", file=sys.stderr)
            if number % KILLS_A_ROOT == KILLS_A_ROOT - 1 or row.broken:
                shutil.rmtree(root.path, ignore_errors=not row.broken)
                if row.broken:
                    root.path.mkdir()
                    root.expected = Expected()
            progress(number + 1)

    def _one(self, root: Root, point: str, number: int) -> Row:
        row, expected = Row(kills=1), root.expected
        self._record.clear()
        self._found.clear()
        self._rest[0] = 0
        # Stores with two codecs beside each other would give one key two names, of which an open keeps one.
        codec = root.codec or self._chance.choice(CODECS)
        child = self._start(root, point, codec)
        neighbour = self._start(root, "at random", codec) if number % 4 == 3 else None
        if not self._kill_at(child, point):
            row.other += 1
            self.complaints.append("the process ended, or hangs")
        if neighbour is not None:
            if not self._goes_on(neighbour):
                row.other += 1
                self.complaints.append("the process beside the killed one does not go on")
            elif not account_is_right(root.path):
                row.other += 1
                self.complaints.append("the account beside the killed process is not what lies on the disk")
            neighbour.kill()
        expected.replay(self._record)
        row.loads, row.wrong = self._record.count(Did.LOADED), self._record.count(Did.WRONG)
        if row.wrong:
            self.complaints.append("a load of the killed process had wrong bytes")
        self._look(root, row)
        found = {chunk for did, chunk in self._found if did is Did.FOUND}
        row.survivors = len(found)
        row.lost_newest = len(expected.in_flight - found)
        if not row.broken:
            row.lost = len(expected.sure - found)
            strange = found - expected.sure - expected.maybe
            row.other += len(strange)
            if row.broken:
                self.complaints.append(f"lost {expected.sure - found}, and nobody stored {strange}")
        expected.settle(found)
        return row

    def _start(self, root: Root, point: str, codec: str) -> Child:
        chance = random.Random(self._chance.random())
        which = chance.randrange(2)

        def work(signal_fd: int) -> None:
            upkeep.UPKEEP_INTERVAL_S = 0.005
            if root.large:
                small_counts_as_large()
                upkeep.SNAPSHOT_INTERVAL_S = 0.01
            record_renames(self._record)
            kill_point = KillPoint(point, chance, signal_fd)
            if point == "in recovery, at random":
                os.write(signal_fd, b"r")
            kill_point.arm_before_open()
            store = ChunkStore.open(root.path, NAMESPACES[which], random_settings(chance, codec))
            kill_point.opened()
            if point == "at random":
                os.write(signal_fd, b"r")
            workload = Workload(self._seed, which, store, self._record, chance)
            if point == "in close":
                for _ in range(chance.randrange(12)):
                    workload.turn()
                kill_point.arm_before_close()
                store.close()
                kill_point.stop()
            while not self._rest[0]:
                workload.turn()
                os.write(signal_fd, b".")
            os.write(signal_fd, b"z")
            time.sleep(2 * STUCK_S)

        return Child(work)

    def _kill_at(self, child: Child, point: str) -> bool:
        if point.endswith("at random"):
            ready = child.word(STUCK_S) == b"r"
            time.sleep(self._chance.uniform(0, RANDOM_KILL_S) if ready else 0)
            child.kill()
            return ready
        while (word := child.word(STUCK_S)) == b".":
            pass
        child.kill()
        return word == b"!"

    def _goes_on(self, neighbour: Child) -> bool:
        turns = 0
        while turns < NEIGHBOUR_TURNS:
            word = neighbour.word(STUCK_S)
            if not word:
                return False
            turns += word == b"."
        self._rest[0] = 1
        while (word := neighbour.word(STUCK_S)) == b".":
            pass
        return word == b"z"

    def _look(self, root: Root, row: Row) -> None:
        def work(signal_fd: int) -> None:
            if root.large:
                look_as_at_a_large_store()
            try:
                verify(root.path, self._seed, self._found)
            except Broken as broken:
                os.write(signal_fd, f"{broken.kind}: {broken}"[:4000].encode())

        child = Child(work)
        said = b""
        while byte := child.word(STUCK_S):
            said += byte
        if child.end() != 0:
            said = said or b"other: the verifying process failed"
        if said:
            kind = said.decode().partition(":")[0].replace(" ", "_")
            setattr(row, kind, getattr(row, kind) + 1)
            self.complaints.append(said.decode())


def table(rows: dict[str, Row]) -> str:
    total = Row()
    for row in rows.values():
        total.add(row)
    columns = [name.replace("_", " ") for name in Row.__struct_fields__]
    width = max(map(len, rows))
    lines = ["  ".join(["killed".ljust(width), *(column.rjust(max(9, len(column))) for column in columns)])]
    for name, row in [*rows.items(), ("all", total)]:
        cells = (
            str(getattr(row, field)).rjust(max(9, len(column))) for field, column in zip(Row.__struct_fields__, columns)
        )
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--directory", type=Path, default=None, help="where the roots are made; a temporary directory")
    parser.add_argument("--json", action="store_true", help="the table as JSON, a row for each point and one for all")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    began = time.monotonic()

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {options.kills} kills", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        campaign = Campaign(seed, Path(directory))
        campaign.run(options.kills, progress)
    if options.json:
        print(json.dumps({name: msgspec.to_builtins(row) for name, row in campaign.rows.items()}))
    else:
        print(table(campaign.rows))
        print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    return 1 if any(row.broken for row in campaign.rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
