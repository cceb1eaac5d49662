"""Replays a Mooncake-format trace through eviction policies and admission rules and prints one table.

    python benchmarks/eviction.py --trace FILE [--json FILE] [--shares 0.01,0.05,0.1,0.25]

Everything but the files is the product's own: its `Index` with its order of uses, refreshes and evictions, its
`Admission`, its `WriteBudget`, and its policies `TailFirstLru` and `HitDensity` (the default). A simulated clock runs
by the trace's timestamps. The capacity is a share of the trace's unique blocks. A request is looked up, and what is
missing is stored behind what was found, head first. Only an unbroken prefix counts as hit.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from eviction_peers import GreedyDual, PlainLru, S3Fifo, clairvoyant
from machine import machine
from rich.console import Console
from rich.table import Table
from rows import Row, write_json

from lmcache_nvme_backend.store import ChunkKey, StoreSettings, digest_fields
from lmcache_nvme_backend.store.account import Ledger
from lmcache_nvme_backend.store.admission import Admission
from lmcache_nvme_backend.store.density import HitDensity
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.policy import EvictionPolicy, TailFirstLru
from lmcache_nvme_backend.store.settings import EVICT_BATCH
from lmcache_nvme_backend.store.write_budget import WriteBudget

EPOCH_S = 1_700_000_000.0  # of the simulated clock
DEFAULT, BASE, BOUND = "default: hit density, auto", "LRU", "clairvoyant"
# Budgets that allow this share of what storing everything writes during the trace: a quarter of a day's budget at once,
# the rest as time goes by.
BUDGET_SHARES = (0.5, 0.25)

Requests = list[tuple[float, list[ChunkKey]]]


class Line(msgspec.Struct):
    """One line of the trace; `timestamp` in ms, `hash_ids` one a block of 512 tokens."""

    timestamp: float
    hash_ids: list[int]


class Outcome(msgspec.Struct):
    """What became of a trace: blocks, the second half of the requests apart, and why blocks were missed."""

    asked: int = 0
    hits: int = 0
    late_asked: int = 0
    late_hits: int = 0
    written: int = 0
    missed: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        return self.hits / self.asked

    @property
    def late_ratio(self) -> float:
        return self.late_hits / self.late_asked

    @property
    def early_ratio(self) -> float:
        return (self.hits - self.late_hits) / (self.asked - self.late_asked)

    @property
    def writes(self) -> float:
        return self.written / self.asked

    def count(self, asked: int, hits: int, late: bool) -> None:
        self.asked += asked
        self.hits += hits
        if late:
            self.late_asked += asked
            self.late_hits += hits


class Full:
    """The account of a root that holds this index and nothing else."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def peek(self) -> Ledger:
        return Ledger(self._index.nbytes, 0)


def read_trace(path: Path) -> tuple[Requests, int]:
    """(time in seconds and keys of each request, unique blocks)."""
    names: dict[int, ChunkKey] = {}
    requests: Requests = []
    with path.open("rb") as file:
        for line in file:
            found = msgspec.json.decode(line, type=Line)
            for block in found.hash_ids:
                if block not in names:
                    names[block] = digest_fields(block)
            requests.append((found.timestamp / 1000, [names[block] for block in found.hash_ids]))
    return requests, len(names)


def replay(
    requests: Requests,
    capacity: int,
    make: Callable[[Callable[[], float]], EvictionPolicy],
    admission: Any = "all",
    budget_blocks_per_day: int = 0,
) -> Outcome:
    """One policy and one admission rule on the whole trace."""
    now = EPOCH_S
    policy = make(lambda: now)
    index = Index(policy, lambda: int(now * 1e9))
    settings = StoreSettings(
        quota_bytes=capacity * BLOCK, admission=admission, write_budget_bytes_per_day=budget_blocks_per_day * BLOCK
    )
    found = Outcome()
    seen: set[ChunkKey] = set()
    written: set[ChunkKey] = set()
    with tempfile.TemporaryDirectory(prefix="eviction-") as folder:
        budget = WriteBudget(f"{folder}/writes", settings.write_budget_bytes_per_day, lambda: int(now * 1e9))
        gate = Admission(settings, Full(index), index, budget)  # type: ignore[arg-type]
        for number, (at, keys) in enumerate(requests):
            now = EPOCH_S + at
            hits = index.use_prefix(keys, pin=False)
            found.count(len(keys), hits, late=number >= len(requests) // 2)
            for key in keys[hits:]:
                if key not in seen:
                    found.missed["never seen"] += 1
                elif key in index:
                    found.missed["behind a hole"] += 1
                elif key in written:
                    found.missed["evicted too soon"] += 1
                else:
                    found.missed["refused"] += 1
            seen.update(keys)
            spare = set(keys[:hits])
            for depth in range(hits, len(keys)):
                key = keys[depth]
                if key not in index:
                    admitted = gate.refusal(key, BLOCK) is None and make_room(index, settings, spare)
                    if not admitted or not budget.take(BLOCK):
                        break
                    index.add(key, depth, 1, keys[depth - 1] if depth else None)
                    written.add(key)
                    found.written += 1
                spare.add(key)
    return found


def make_room(index: Index, settings: StoreSettings, spare: set[ChunkKey]) -> bool:
    """As the store's evictor does for its own namespace: a batch at a time, and some headroom with it."""
    while (missing := index.nbytes + BLOCK - settings.quota_bytes) > 0:
        if not index.take_coldest(missing, settings.headroom_bytes, EVICT_BATCH, spare):
            return False
    return True


def bound(requests: Requests, capacity: int) -> Outcome:
    found = Outcome()
    for number, ((_, keys), (hits, writes)) in enumerate(zip(requests, clairvoyant(requests, capacity), strict=True)):
        found.count(len(keys), hits, late=number >= len(requests) // 2)
        found.written += writes
    return found


SUBJECTS: dict[str, tuple[Callable[[Callable[[], float]], EvictionPolicy], str]] = {
    BASE: (lambda _: PlainLru(), "all"),
    "tail-first LRU": (lambda _: TailFirstLru(), "all"),
    "S3-FIFO, prefix order": (lambda _: S3Fifo(), "all"),
    "cost-aware (GreedyDual)": (lambda _: GreedyDual(), "all"),
    "hit density, all": (HitDensity, "all"),
    "hit density, second-sight": (HitDensity, "second-sight"),
    DEFAULT: (HitDensity, "auto"),
}


def run_all(requests: Requests, unique: int, shares: list[float]) -> dict[str, list[Outcome]]:
    """Outcomes by subject, one a capacity."""
    console = Console(stderr=True)
    found: dict[str, list[Outcome]] = {}
    capacities = [int(unique * share) for share in shares]
    span_s = requests[-1][0] - requests[0][0]
    for subject, (make, admission) in SUBJECTS.items():
        console.log(subject)
        found[subject] = [replay(requests, capacity, make, admission) for capacity in capacities]
    for share in BUDGET_SHARES:
        subject = f"{DEFAULT}, budget {share:g}"
        console.log(subject)
        found[subject] = [
            replay(
                requests, capacity, HitDensity, "auto",
                int(found["hit density, all"][place].written * share / (0.25 + 0.75 * span_s / 86400)),
            )
            for place, capacity in enumerate(capacities)
        ]  # fmt: skip
    console.log(BOUND)
    found[BOUND] = [bound(requests, capacity) for capacity in capacities]
    return found


def closed(found: dict[str, list[Outcome]], subject: str, place: int, of: str = "ratio") -> float | None:
    """How much of the gap between LRU and the clairvoyant bound a subject closes, in percent."""
    base, best, value = (getattr(found[name][place], of) for name in (BASE, BOUND, subject))
    return 100 * (value - base) / (best - base) if best - base > 1e-6 else None


def rows_of(found: dict[str, list[Outcome]], unique: int, shares: list[float]) -> list[Row]:
    rows = []
    for subject, outcomes in found.items():
        for place, (share, outcome) in enumerate(zip(shares, outcomes, strict=True)):
            size, base = int(unique * share), found[BASE][place]
            rows.append(Row(subject, "hit ratio", size, 100 * outcome.ratio, "%", outcome.ratio / base.ratio))
            rows.append(
                Row(subject, "writes", size, outcome.writes, "blocks/block asked", outcome.writes / base.writes)
            )
            for operation, of in (
                ("gap closed", "ratio"),
                ("gap closed, first half", "early_ratio"),
                ("gap closed, second half", "late_ratio"),
            ):
                value = closed(found, subject, place, of)
                if value is not None:
                    rows.append(Row(subject, operation, size, value, "%"))
            rows.extend(
                Row(subject, f"missed: {cause}", size, 100 * count / outcome.asked, "%")
                for cause, count in sorted(outcome.missed.items())
            )
    return rows


def show(found: dict[str, list[Outcome]], unique: int, shares: list[float], asked: int) -> None:
    table = Table(
        title=f"Hit ratio % (blocks written per block asked; gap to clairvoyant closed %), {asked:,} blocks asked, "
        f"{unique:,} unique"
    )
    table.add_column("policy, admission")
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right")
    for subject, outcomes in found.items():
        cells = []
        for place, outcome in enumerate(outcomes):
            gap = closed(found, subject, place)
            told = "" if gap is None or subject in (BASE, BOUND) else f"; {gap:+.0f}"
            cells.append(f"{100 * outcome.ratio:.2f} ({outcome.writes:.2f}{told})")
        table.add_row(subject, *cells, end_section=subject == BOUND)
    for half, of in (("first", "early_ratio"), ("second", "late_ratio")):
        gaps = [closed(found, DEFAULT, place, of) for place in range(len(shares))]
        table.add_row(
            f"default: gap closed in the {half} half", *("—" if gap is None else f"{gap:+.0f}" for gap in gaps)
        )
    table.add_section()
    for cause in ("never seen", "evicted too soon", "refused", "behind a hole"):
        table.add_row(f"default misses: {cause}", *(f"{100 * o.missed[cause] / o.asked:.1f} %" for o in found[DEFAULT]))
    Console(width=140).print(table)


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake JSONL")],
    shares: Annotated[str, typer.Option(help="capacities as shares of the unique blocks")] = "0.01,0.05,0.1,0.25",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    requests, unique = read_trace(trace)
    sizes = [float(share) for share in shares.split(",")]
    found = run_all(requests, unique, sizes)
    show(found, unique, sizes, sum(len(keys) for _, keys in requests))
    if json_file is not None:
        write_json(json_file, rows_of(found, unique, sizes), machine(Path.cwd()))


if __name__ == "__main__":
    typer.run(main)
