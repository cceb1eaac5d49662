"""How fast a context moves to the drive and back: each subject in a process of its own, and fio's line, round by round.

fio writes and reads as many bytes in the same directory with O_DIRECT and the same block size; its line is that of the
job count (1, 2, 4) with the best median. Rounds alternate between the subjects, and the page cache is dropped before
every load.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import msgspec
from machine import cpu_seconds, drop_page_cache, peak_growth, resident_bytes
from rows import Row

GIB, MIB, GB = 1 << 30, 1 << 20, 1e9
JOBS = (1, 2, 4)


class Sample(msgspec.Struct, frozen=True):
    """One transfer of the whole context. `resident` is the peak above what the process held before it opened."""

    seconds: float
    cpu_s: float
    rss_growth: int = 0  # bytes
    resident: int = 0


class Subject(Protocol):
    """What is measured: one context of a given number of chunks."""

    def store(self) -> Sample:
        """A context nobody has seen, until its last chunk is on the disk."""

    def load(self) -> Sample:
        """The context just stored, to another place; raises `RuntimeError` where other bytes come back."""


# Of a directory, a chunk's bytes and the number of chunks. It crosses to another process, so it can be pickled.
Open = Callable[[Path, int, int], Subject]


def timed(call: Callable[[], object], before_opening: int) -> Sample:
    began_at = resident_bytes()
    with peak_growth() as growth:
        cpu, begin = cpu_seconds(), time.perf_counter()
        call()
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    return Sample(seconds, cpu, growth.nbytes, growth.nbytes + max(0, began_at - before_opening))


def serve(pipe: Any, open_subject: Open, directory: Path, chunk_bytes: int, chunks: int) -> None:
    """The child: `store` and `load` on request, an answer each."""
    try:
        one = open_subject(directory, chunk_bytes, chunks)
        pipe.send(None)
        while (order := pipe.recv()) != "end":
            pipe.send(one.store() if order == "store" else one.load())
    except Exception as e:
        pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
        raise
    finally:
        os._exit(0)  # the subjects' threads need not end in order


class Child:
    """A subject in a process of its own, so that its memory and its CPU time are its own."""

    def __init__(self, subject: str, open_subject: Open, directory: Path, chunk_bytes: int, chunks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other, open_subject, directory, chunk_bytes, chunks))
        self._process.start()
        other.close()
        self.subject = subject
        self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self.subject}: {answer}") from answer
        return answer

    def ask(self, order: str) -> Sample:
        self._pipe.send(order)
        sample: Sample = self._answer()
        return sample

    def end(self) -> None:
        try:
            self._pipe.send("end")
        except OSError:
            pass
        self._process.join(20)
        self._process.kill()
        self._process.join()


def fio(directory: Path, block: int, nbytes: int, jobs: int, operation: str) -> Sample:
    """The drive's line: sequential, O_DIRECT, files that the write run leaves for the read run."""
    size = nbytes // jobs // block * block
    command = ["fio", "--name=line", f"--directory={directory}", f"--rw={operation}", f"--bs={block}", f"--size={size}"]
    command += [f"--numjobs={jobs}", "--direct=1", "--ioengine=psync", "--group_reporting", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = size * jobs / job[operation]["bw_bytes"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job[operation]["runtime"] / 1000 * jobs
    return Sample(seconds * nbytes / (size * jobs), busy)


class Figures(msgspec.Struct):
    """All rounds of one chunk size: samples by (subject, operation), fio's by its job count too."""

    nbytes: int
    samples: dict[tuple[str, str], list[Sample]] = msgspec.field(default_factory=dict)

    def add(self, subject: str, operation: str, sample: Sample) -> None:
        self.samples.setdefault((subject, operation), []).append(sample)

    def rates(self, subject: str, operation: str) -> list[float]:
        """GB/s, a round each."""
        return [self.nbytes / sample.seconds / GB for sample in self.samples.get((subject, operation), [])]

    def line(self, operation: str) -> str | None:
        """The fio job count with the best median."""
        names = [f"fio-{jobs}" for jobs in JOBS if (f"fio-{jobs}", operation) in self.samples]
        return max(names, key=lambda name: median(self.rates(name, operation)), default=None)

    def rows(self, chunk_bytes: int, subjects: Sequence[str]) -> list[Row]:
        """A row each, the line first. The first subject is this project's, the others are its peers."""
        rows = []
        for operation in ("store", "load"):
            line = self.line(operation)
            peers = [median(rates) for peer in subjects[1:] if (rates := self.rates(peer, operation))]
            for subject in (*((line,) if line else ()), *subjects):
                rates = self.rates(subject, operation)
                if not rates:
                    continue
                samples = self.samples[subject, operation]
                rows.append(
                    Row(
                        subject="fio" if subject == line else subject,
                        operation=operation,
                        size=chunk_bytes,
                        value=median(rates),
                        unit="GB/s",
                        peer_ratio=median(rates) / max(peers) if peers else None,
                        share_of_fio=self._share(rates, self.rates(line, operation)) if line else None,
                        rss_growth_mib=None if subject == line else max(s.rss_growth for s in samples) / MIB,
                        resident_mib=None if subject == line else max(s.resident for s in samples) / MIB,
                        cpu_s_per_gb=median(s.cpu_s for s in samples) / (self.nbytes / GB),
                        samples=rates,
                        note=f"{subject[4:]} jobs" if subject == line else None,
                    )
                )
        return rows

    @staticmethod
    def _share(rates: list[float], line: list[float]) -> float:
        """Round by round, since the drive's own speed changes from one to the next."""
        return median(rate / of for rate, of in zip(rates, line, strict=True))


def measure(
    chunk_mib: int, gib: float, rounds: int, directory: Path, subjects: Mapping[str, Open], say: Callable[[str], None]
) -> list[Row]:
    """The rows of one chunk size: in each round every subject has its turn, and fio."""
    chunk_bytes = chunk_mib * MIB
    chunks = int(gib * GIB) // chunk_bytes
    figures = Figures(chunks * chunk_bytes)
    folders = {subject: directory / subject for subject in (*subjects, "fio")}
    for folder in folders.values():
        folder.mkdir()
    children: list[Child] = []
    try:
        for subject, open_subject in subjects.items():
            children.append(Child(subject, open_subject, folders[subject], chunk_bytes, chunks))
        for number_of_round in range(rounds):
            say(f"chunks of {chunk_mib} MiB, round {number_of_round + 1} of {rounds} …")
            turns = [partial(_turn, child, folders[child.subject], figures) for child in children]
            turns.append(partial(_fio_turn, folders["fio"], chunk_bytes, figures))
            for i in range(len(turns)):
                turns[(i + number_of_round) % len(turns)]()
    finally:
        for child in children:
            child.end()
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    return figures.rows(chunk_bytes, tuple(subjects))


def _turn(child: Child, folder: Path, figures: Figures) -> None:
    figures.add(child.subject, "store", child.ask("store"))
    drop_page_cache(folder)
    figures.add(child.subject, "load", child.ask("load"))
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in (".kv", ".pt", ".data"):
            path.unlink()


def _fio_turn(folder: Path, block: int, figures: Figures) -> None:
    if shutil.which("fio") is None:
        return
    for jobs in JOBS:
        for operation, rw in (("store", "write"), ("load", "read")):
            drop_page_cache(folder)
            figures.add(f"fio-{jobs}", operation, fio(folder, block, figures.nbytes, jobs, rw))
        for path in folder.iterdir():
            path.unlink()
