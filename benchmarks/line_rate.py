"""A long context through the tier and back, beside fio and LMCache's own disk backends, in one run.

    python benchmarks/line_rate.py [--directory DIR] [--gib 4] [--chunks 1,6,8,18] [--rounds 3] [--json FILE]

Every subject but fio is a real `LMCacheEngine` with that one storage backend, in a process of its own; its `store` and
`retrieve` are what is timed, with the connector's copy from and to a paged KV, until the last byte is on the disk.
fio writes and reads as many bytes in the same directory with O_DIRECT and the same block size; its line is that of the
job count (1, 2, 4) with the best median. Rounds alternate between the subjects; all of them bypass the page cache, and
it is dropped before every load.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from machine import cpu_seconds, drop_page_cache, machine, peak_growth, resident_bytes, tool_version
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

GIB, MIB, GB = 1 << 30, 1 << 20, 1e9
LAYERS, HEADS, BLOCK_TOKENS, CHUNK_TOKENS = 4, 8, 32, 256
# Chunks' worth of KV in memory: the context's chunks take turns in it, so that a 4 GiB context needs no 4 GiB of KV.
POOL_CHUNKS = 5
JOBS = (1, 2, 4)
SUBJECTS = ("nvme-backend", "lmcache-local-disk", "lmcache-fs")
STAGING_MIB = 256
NO_QUOTA_GIB = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """One transfer of the whole context. `resident` is the peak above what the process held before it opened."""

    seconds: float
    cpu_s: float
    rss_growth: int = 0  # bytes
    resident: int = 0


def lmcache_config(subject: str, directory: Path, nbytes: int) -> dict[str, Any]:
    """Each backend as its documentation has it, with O_DIRECT. LMCache's own need a CPU pool for a whole context.

    No quota is in the way: the files of a round are deleted behind the backends, which go on counting them.
    """
    top: dict[str, Any] = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "pre_caching_hash_algorithm": "sha256_cbor",
        "blocking_timeout_secs": 600,
    }
    if subject == "nvme-backend":
        return top | {
            "max_local_cpu_size": 0,
            "storage_plugins": ["nvme"],
            "extra_config": {
                "storage_plugin.nvme.module_path": "lmcache_nvme_backend",
                "storage_plugin.nvme.class_name": "NvmeBackend",
                "nvme.path": str(directory),
                "nvme.quota_gib": NO_QUOTA_GIB,
                "nvme.staging_mib": STAGING_MIB,
                "nvme.model_fingerprint": "line-rate",
                # One call stores the whole context here, not one step of it: nothing may be dropped for being late.
                "nvme.store_wait_ms": 600_000,
            },
        }
    top["max_local_cpu_size"] = nbytes / GIB + 0.5
    if subject == "lmcache-local-disk":
        return top | {
            "local_disk": f"{directory}/",
            "max_local_disk_size": NO_QUOTA_GIB,
            "extra_config": {"use_odirect": True},
        }
    return top | {
        "remote_url": f"fs://localhost:0{directory}/",
        "remote_serde": "naive",
        "extra_config": {"fs_connector_use_odirect": True, "save_chunk_meta": False},
    }


class Context:
    """A paged KV with a source and a target, and the slot mapping of a context that passes through it."""

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        import torch

        hidden = chunk_bytes // (2 * LAYERS * CHUNK_TOKENS * 2)
        head = hidden // HEADS
        if 2 * LAYERS * CHUNK_TOKENS * HEADS * head * 2 != chunk_bytes:
            raise typer.BadParameter(f"a chunk of {chunk_bytes} bytes is no whole number of heads")
        self.kv_shape = (LAYERS, 2, CHUNK_TOKENS, HEADS, head)
        self.tokens = chunks * CHUNK_TOKENS
        self._pool_blocks = POOL_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
        shape = (2 * self._pool_blocks, HEADS, BLOCK_TOKENS, 2 * head)
        generator = torch.Generator().manual_seed(0)
        self.layers = [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
            for _ in range(LAYERS)
        ]
        pool_tokens = POOL_CHUNKS * CHUNK_TOKENS
        within = torch.arange(self.tokens) % pool_tokens
        self.source, self.target = within, within + pool_tokens

    def clear_target(self) -> None:
        for layer in self.layers:
            layer[self._pool_blocks :] = 0

    def arrived(self) -> bool:
        """Whether the last turn of the context in the target is the source, bit for bit."""
        import torch

        n = min(self._pool_blocks, self.tokens // BLOCK_TOKENS)
        return all(
            torch.equal(layer[:n].view(torch.int16), layer[self._pool_blocks :][:n].view(torch.int16))
            for layer in self.layers
        )


class LmcacheSubject:
    """One LMCacheEngine with one storage backend."""

    def __init__(self, subject: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
        import torch
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata

        from lmcache_nvme_backend.doors import lmcache_compat
        from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector

        torch.set_num_threads(1)  # the connector's copy is one thread's, as in an engine's worker
        self.context = Context(chunk_bytes, chunks)
        self._before_opening = resident_bytes()
        metadata = LMCacheMetadata(
            model_name="line-rate", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=self.context.kv_shape, role="worker", chunk_size=CHUNK_TOKENS,
        )  # fmt: skip
        if subject == "nvme-backend":
            lmcache_compat.apply_all(with_vllm=False)
        config = LMCacheEngineConfig.from_dict(lmcache_config(subject, directory, chunk_bytes * chunks))
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            subject, config, metadata, CpuBlockConnector(metadata), lambda t, src: t, lambda o, src: o
        )
        self.engine.post_init()
        backends = self.engine.storage_manager.storage_backends
        self.backend = next(b for name, b in backends.items() if name != "LocalCPUBackend")
        self._round = 0
        self._prompt: list[int] = []

    def store(self) -> Sample:
        """A context nobody has seen, until the last chunk is on the disk."""
        self._round += 1
        self._prompt = [(self._round << 24) + i for i in range(self.context.tokens)]
        keys = [key for _, _, key in self.engine.token_database.process_tokens(self._prompt)]
        kv = {"kvcaches": self.context.layers, "slot_mapping": self.context.source, "offset": 0}

        def store() -> None:
            self.engine.store(self._prompt, req_id=f"s{self._round}", **kv)
            self._settle(keys)

        sample = timed(store, self._before_opening)
        if not all(self.backend.contains(key) for key in keys):
            dropped = getattr(self.backend, "saver", None) and self.backend.saver.dropped.snapshot()
            raise RuntimeError(f"not every chunk was stored; dropped: {dropped}")
        return sample

    def _settle(self, keys: list[Any]) -> None:
        for key in keys:
            while self.backend.exists_in_put_tasks(key):
                time.sleep(0.0005)

    def load(self) -> Sample:
        """The context just stored, into other blocks: what a worker does for a hit."""
        import torch

        self.context.clear_target()
        request = f"l{self._round}"
        kv = {"kvcaches": self.context.layers, "slot_mapping": self.context.target, "vllm_cached_tokens": 0}
        mask = torch.ones(len(self._prompt), dtype=torch.bool)
        loaded = []

        def load() -> None:
            loaded.append(int(self.engine.retrieve(self._prompt, mask, req_id=request, **kv).sum()))

        found = self.engine.lookup(self._prompt, lookup_id=request, pin=True)
        sample = timed(load, self._before_opening)
        self.engine.lookup_unpin(request)
        if found != len(self._prompt) or loaded != [found] or not self.context.arrived():
            raise RuntimeError(f"looked up {found}, loaded {loaded} of {len(self._prompt)} tokens, or other bytes came")
        return sample

    def close(self) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        LMCacheEngineBuilder.destroy(self.engine.config.lmcache_instance_id)


def timed(call: Callable[[], object], before_opening: int) -> Sample:
    began_at = resident_bytes()
    with peak_growth() as growth:
        cpu, begin = cpu_seconds(), time.perf_counter()
        call()
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    return Sample(seconds, cpu, growth.nbytes, growth.nbytes + max(0, began_at - before_opening))


def serve(pipe: Any, subject: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
    """The child: `store` and `load` on request, an answer each."""
    os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
    os.environ.setdefault("PYTHONHASHSEED", "0")
    try:
        one = LmcacheSubject(subject, directory, chunk_bytes, chunks)
        pipe.send(None)
        while (order := pipe.recv()) != "end":
            pipe.send(one.store() if order == "store" else one.load())
    except Exception as e:
        pipe.send(e)
        raise
    finally:
        os._exit(0)  # LMCache's threads need not end in order


class Child:
    """A subject in a process of its own, so that its memory and its CPU time are its own."""

    def __init__(self, subject: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other, subject, directory, chunk_bytes, chunks))
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

    def rows(self, chunk_bytes: int) -> list[Row]:
        rows = []
        for operation in ("store", "load"):
            line = self.line(operation)
            peers = [median(rates) for peer in SUBJECTS[1:] if (rates := self.rates(peer, operation))]
            for subject in (*((line,) if line else ()), *SUBJECTS):
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
    chunk_mib: int, gib: float, rounds: int, directory: Path, subjects: tuple[str, ...], say: Callable[[str], None]
) -> list[Row]:
    chunk_bytes = chunk_mib * MIB
    chunks = int(gib * GIB) // chunk_bytes
    figures = Figures(chunks * chunk_bytes)
    folders = {subject: directory / subject for subject in (*subjects, "fio")}
    for folder in folders.values():
        folder.mkdir()
    children: list[Child] = []
    try:
        for subject in subjects:
            children.append(Child(subject, folders[subject], chunk_bytes, chunks))
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
    return figures.rows(chunk_bytes)


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


def main(
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    gib: Annotated[float, typer.Option(min=0.05, help="Size of the context.")] = 4,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in MiB.")] = "1,6,8,18",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    peers: Annotated[bool, typer.Option(help="LMCache's own backends, too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Load and store at the drive's own line, beside its line and LMCache's own backends."""
    console = Console(width=max(112, Console().width))
    subjects = SUBJECTS if peers else SUBJECTS[:1]
    say = partial(console.print, style="dim")
    with tempfile.TemporaryDirectory(prefix="line-rate-", dir=directory or Path.home()) as folder:
        rows = [
            row for size in chunks.split(",") for row in measure(int(size), gib, rounds, Path(folder), subjects, say)
        ]
        facts = machine(Path(folder))
    facts["fio"] = tool_version("fio")
    table = Table(title=f"A context of {gib:g} GiB, {rounds} alternating rounds, medians; staging {STAGING_MIB} MiB")
    columns = ("chunk", "operation", "subject", "GB/s", "of fio", "of best peer", "growth MiB", "held MiB", "CPU s/GB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("operation", "subject") else "right")
    for before, row in zip([None, *rows], rows):
        if before is not None and (before.size, before.operation) != (row.size, row.operation):
            table.add_section()
        table.add_row(
            f"{row.size // MIB} MiB", row.operation, row.subject + (f" ({row.note})" if row.note else ""),
            number(row.value), number(row.share_of_fio), number(row.peer_ratio), number(row.rss_growth_mib, ".0f"),
            number(row.resident_mib, ".0f"), number(row.cpu_s_per_gb),
        )  # fmt: skip
    console.print(table)
    if facts["fio"] is None:
        console.print("fio is not installed: no line to compare with (apt-get install fio).")
    if json_file is not None:
        write_json(json_file, rows, facts, gib=gib, rounds=rounds, staging_mib=STAGING_MIB)


if __name__ == "__main__":
    typer.run(main)
