"""What a lookup costs where four processes share a namespace: its hits, its misses, and what another has just stored.

    python benchmarks/shared.py [--chunks 100000] [--directory DIR] [--rounds 3] [--json FILE]

A namespace of so many chunks (empty files with a chunk's name) is open in this process: alone, beside three processes
that do nothing, and beside three that store a chunk every 20 ms each (an engine that prefills 12,000 tokens a second
does). Lookups are `match` of 512 keys:

- *hit*: all are there and known;
- *miss*: the first is nowhere, as of a prompt that nobody has seen. Each miss is of another key;
- *stored by another*: all 512 have just been stored by another process and are looked up for the first time, and again.

Medians, and the 99th percentile of hits and misses.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import typer
from index import BLOCKS, NAMESPACE, PREFIX, fill, key_of, timed
from machine import machine
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from lmcache_nvme_backend.store import ChunkKey, ChunkStore, StoreSettings, digest_fields
from lmcache_nvme_backend.store.format import chunk_name
from lmcache_nvme_backend.store.layout import Layout

OTHERS = 3
STORE_EVERY_S = 0.02
LOOKUPS = 300
# Stored chunks are small: it is the directories that count here. A prefix that another stores is named, not written.
PAYLOAD = memoryview(bytes(4096))
SETTINGS = StoreSettings(quota_bytes=1 << 60)


def child(root: Path, number: int) -> None:
    """Another process of the namespace; it obeys `write`, `rest`, `prefix N` and the end of its input."""
    store = ChunkStore.open(root, NAMESPACE, SETTINGS)
    os.set_blocking(sys.stdin.fileno(), False)
    layout, directory = Layout(str(root)), store.directory
    print("ready", flush=True)
    writing, stored = False, 0
    while True:
        line = sys.stdin.readline()
        if line.startswith("prefix"):
            for depth, key in enumerate(other_prefix(int(line.split()[1]))):
                path = f"{layout.shard(NAMESPACE.digest, key)}/{chunk_name(key, depth, BLOCKS)}"
                os.close(os.open(f"{layout.temp}/{store._session.id}-99", os.O_CREAT))
                Path(layout.temp, f"{store._session.id}-99").rename(path)
            print("done", flush=True)
        elif line:
            writing = line == "write\n"
            if line == "end\n":
                break
        if writing:
            store.put(digest_fields("written", directory, number, stored), PAYLOAD, depth=0)
            stored += 1
        time.sleep(STORE_EVERY_S)
    store.close()


def other_prefix(number: int) -> list[ChunkKey]:
    return [digest_fields("other", number, depth) for depth in range(PREFIX)]


class Others:
    """The processes beside this one."""

    def __init__(self, root: Path) -> None:
        self._children = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(root), str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for number in range(OTHERS)
        ]  # fmt: skip
        for process in self._children:
            self._answer(process)

    def say(self, word: str) -> None:
        for process in self._children:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")

    def store_prefix(self, number: int) -> None:
        process = self._children[0]
        assert process.stdin is not None
        process.stdin.write(f"prefix {number}\n")
        self._answer(process)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("a process beside this one has ended")

    def end(self) -> None:
        for process in self._children:
            process.communicate("end\n", timeout=60)


@contextmanager
def beside(root: Path) -> Iterator[Others]:
    others = Others(root)
    try:
        yield others
    finally:
        others.end()


def lookups(store: ChunkStore, round_number: int, how: str) -> dict[str, list[float]]:
    """Microseconds of hits and misses, in turn; there is time for the others between them."""
    prefix = [key_of(i) for i in range(PREFIX)]
    taken: dict[str, list[float]] = {"hit": [], "miss": []}
    for i in range(LOOKUPS):
        taken["hit"].append(timed(lambda: store.match(prefix)) * 1e6)
        unknown = [digest_fields("unknown", how, round_number, i, depth) for depth in range(PREFIX)]
        taken["miss"].append(timed(lambda keys=unknown: store.match(keys)) * 1e6)  # type: ignore[misc]
        time.sleep(0.005)
    return taken


def measure(chunks: int, rounds: int, root: Path, say: Callable[[str], None]) -> list[Row]:
    say(f"naming {chunks:,} files …")
    fill(root, chunks)
    figures: dict[str, list[float]] = {}

    def note(how: str, found: dict[str, list[float]]) -> None:
        for name, samples in found.items():
            figures.setdefault(f"{name}, {how}", []).extend(samples)

    with ChunkStore.open(root, NAMESPACE, SETTINGS) as store:
        while store._upkeep is None or not store._upkeep._ranked:
            time.sleep(0.01)
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}: alone …")
            note("alone", lookups(store, turn, "alone"))
            with beside(root) as others:
                say("beside three that rest …")
                store.match([digest_fields("settle")])
                note("others rest", lookups(store, turn, "rest"))
                say("beside three that store …")
                others.say("write")
                note("others store", lookups(store, turn, "store"))
                say("what another has just stored …")
                others.store_prefix(turn)
                keys = other_prefix(turn)
                for name in ("stored by another, first lookup", "stored by another, second"):
                    begin = time.perf_counter()
                    found = store.match(keys)
                    figures.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
                    if found != PREFIX:
                        raise RuntimeError(f"{found} of {PREFIX} chunks that another process stored were found")
    rows = []
    for name, samples in figures.items():
        rows.append(Row("nvme-backend", name, PREFIX, median(samples), "us"))
        if len(samples) >= LOOKUPS:
            rows.append(Row("nvme-backend", f"{name}, p99", PREFIX, quantiles(samples, n=100)[98], "us"))
    return rows


def main(
    chunks: Annotated[int, typer.Option(min=PREFIX)] = 100_000,
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """What a lookup costs alone and beside other processes of the same namespace."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shared-", dir=directory or Path.home()) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        rows = measure(chunks, rounds, root, lambda text: console.print(text, style="dim"))
        facts = machine(Path(folder))
    table = Table(title=f"match of {PREFIX} keys, {chunks:,} chunks, {rounds} rounds")
    for column in ("what", "µs"):
        table.add_column(column, justify="right" if column == "µs" else "left")
    for row in rows:
        table.add_row(row.operation, number(row.value, ".0f"))
    console.print(table)
    if json_file is not None:
        write_json(json_file, rows, facts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        typer.run(main)
