"""vLLM's own offloading over NVMe (`NvmeOffloadingSpec`): its load at the drive's line, and what it costs others.

    python benchmarks/native.py [--directory DIR] [--gib 2] [--chunks 1,6] [--rounds 3] [--no-engine] [--json FILE]

*Rates*: this door's real worker stores and loads a context through vLLM's own interface, in a process of its own, as
`line_rate.py` does for LMCache's; fio moves as many bytes in the same directory in the same rounds.

*Others*: a real engine (SmolLM2) in which two sequences are being decoded while prompts come back one after the other
from the drive: the pool holds fewer prompts than take turns. Beside it the same with prompts that the pool does hold,
while another process copies as many bytes from memory to memory at the same times. Rounds alternate; the figure is the
99th percentile of the time between two tokens of the two sequences.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import line_rate
import typer
from line_rate import GIB, MIB, Figures, Sample, timed
from machine import machine, resident_bytes, tool_version
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from kvtier.engine import Engine, EngineSpec
from kvtier.model import find_model

SUBJECT = "native-spec"
LAYERS, BLOCKS_PER_CHUNK, POOL_CHUNKS = 16, 8, 4
STAGING_MIB = 256
# Whole chunks of 256, and behind them as few tokens to compute after a restore as after a hit in the pool.
PROMPT_TOKENS, DECODED = 15 * 256 + 32, 240
# Prompts that take turns: more than the pool holds, and as many as it holds for good.
TURNS_TIER, TURNS_POOL = 5, 1
POOL_BLOCKS_SHARE = 3  # prompts of room beside the two sequences


class NativeSubject:
    """One worker of the native door over blocks in memory: the context's chunks take turns in them."""

    def __init__(self, _: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
        import torch

        from lmcache_nvme_backend.doors.native.copies import make_copier
        from lmcache_nvme_backend.doors.native.layout import GroupLayout, Piece
        from lmcache_nvme_backend.doors.native.worker import NvmeOffloadingWorker
        from lmcache_nvme_backend.staging import StagingMemory, StagingRing
        from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings

        torch.set_num_threads(1)
        page = chunk_bytes // LAYERS // BLOCKS_PER_CHUNK
        pieces = tuple(Piece(i, page, i * page * BLOCKS_PER_CHUNK) for i in range(LAYERS))
        layout = GroupLayout(pieces, BLOCKS_PER_CHUNK, page * LAYERS * BLOCKS_PER_CHUNK)
        self._half = POOL_CHUNKS * BLOCKS_PER_CHUNK
        generator = torch.Generator().manual_seed(0)
        shape = (2 * self._half, page)
        self.memory = [torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for _ in range(LAYERS)]
        self._before_opening = resident_bytes()
        self.chunks, self._round = chunks, 0
        store = ChunkStore.open(directory, Namespace({"benchmark": "native"}), StoreSettings(1 << 50))
        ring = StagingRing(StagingMemory(STAGING_MIB * MIB), layout.nbytes)
        self.worker = NvmeOffloadingWorker(
            store, ring, make_copier(self.memory), [layout], [256], 4, 0.25, lambda: None
        )

    def _keys(self) -> list[Any]:
        from lmcache_nvme_backend.store import digest_fields

        return [digest_fields(self._round, i) for i in range(self.chunks)]

    def _blocks(self, first: int) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        ids = [first + i % self._half for i in range(self.chunks * BLOCKS_PER_CHUNK)]
        return GPULoadStoreSpec(ids, group_sizes=[len(ids)], block_indices=[0])

    def _finish(self) -> None:
        done: list[Any] = []
        while not done:
            self.worker.await_any(1.0)
            done = self.worker.get_finished()
        if not done[0].success:
            raise RuntimeError(f"a transfer failed: {self.worker.values()}")

    def store(self) -> Sample:
        from lmcache_nvme_backend.doors.hybrid_prefix import Place
        from lmcache_nvme_backend.doors.native.transfers import NvmeStoreSpec

        self._round += 1
        keys = self._keys()
        places = [Place(key, i, keys[i - 1] if i else None) for i, key in enumerate(keys)]

        def store() -> None:
            self.worker.submit_store(self._round, self._blocks(0), NvmeStoreSpec(places, [len(places)]))
            self._finish()
            self.worker.stores.wait_for_writes(600)

        sample = timed(store, self._before_opening)
        if self.worker.store.match(keys) != len(keys):
            raise RuntimeError(f"not every chunk was stored: {self.worker.stores.dropped.snapshot()}")
        return sample

    def load(self) -> Sample:
        import torch

        from lmcache_nvme_backend.doors.native.transfers import NvmeLoadSpec

        keys = self._keys()
        for tensor in self.memory:
            tensor[self._half :] = 0

        def load() -> None:
            self.worker.submit_load(-self._round, NvmeLoadSpec(keys, keys), self._blocks(self._half))
            self._finish()

        sample = timed(load, self._before_opening)
        n = min(self._half, self.chunks * BLOCKS_PER_CHUNK)
        if not all(torch.equal(t[:n], t[self._half :][:n]) for t in self.memory):
            raise RuntimeError("other bytes came back than were stored")
        return sample


def serve(pipe: Any, subject: str, directory: Path, chunk_bytes: int, chunks: int) -> None:
    """The child: `store` and `load` on request, an answer each."""
    try:
        one = NativeSubject(subject, directory, chunk_bytes, chunks)
        pipe.send(None)
        while (order := pipe.recv()) != "end":
            pipe.send(one.store() if order == "store" else one.load())
    except Exception as e:
        pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
        raise
    finally:
        os._exit(0)


class Child(line_rate.Child):
    """The same pipe, another subject behind it."""

    def __init__(self, directory: Path, chunk_bytes: int, chunks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(other, SUBJECT, directory, chunk_bytes, chunks))
        self._process.start()
        other.close()
        self.subject = SUBJECT
        self._answer()


def rates(chunk_mib: int, gib: float, rounds: int, directory: Path, say: Any) -> list[Row]:
    chunk_bytes = chunk_mib * MIB
    chunks = int(gib * GIB) // chunk_bytes
    figures = Figures(chunks * chunk_bytes)
    folders = {name: directory / name for name in (SUBJECT, "fio")}
    for folder in folders.values():
        folder.mkdir()
    child = Child(folders[SUBJECT], chunk_bytes, chunks)
    try:
        for turn in range(rounds):
            say(f"chunks of {chunk_mib} MiB, round {turn + 1} of {rounds} …")
            turns = [
                partial(line_rate._turn, child, folders[SUBJECT], figures),
                partial(line_rate._fio_turn, folders["fio"], chunk_bytes, figures),
            ]
            for one in turns[:: 1 if turn % 2 else -1]:
                one()
    finally:
        child.end()
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for operation in ("store", "load"):
        line = figures.line(operation)
        for subject in (*((line,) if line else ()), SUBJECT):
            values, samples = figures.rates(subject, operation), figures.samples[subject, operation]
            rows.append(
                Row(
                    subject="fio" if subject == line else subject,
                    operation=operation,
                    size=chunk_bytes,
                    value=median(values),
                    unit="GB/s",
                    share_of_fio=figures._share(values, figures.rates(line, operation)) if line else None,
                    resident_mib=None if subject == line else max(s.resident for s in samples) / MIB,
                    cpu_s_per_gb=median(s.cpu_s for s in samples) / (figures.nbytes / 1e9),
                    samples=values,
                    note=f"{subject[4:]} jobs" if subject == line else None,
                )
            )
    return rows


# --- what a restore costs the others ----------------------------------------------------------------------------------


def copy_on_demand(pipe: Any, largest: int) -> None:
    """Another process: copies as many bytes as it is told, once, with one thread."""
    import numpy as np

    source, target = np.ones(largest, np.int8), np.zeros(largest, np.int8)
    pipe.send(None)
    while (nbytes := pipe.recv()) > 0:
        np.copyto(target[:nbytes], source[:nbytes])
        pipe.send(None)


class Copier:
    """That process."""

    def __init__(self, largest: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=copy_on_demand, args=(other, largest), daemon=True)
        self._process.start()
        self._pipe.recv()

    def copy(self, nbytes: int) -> None:
        self._pipe.send(nbytes)

    def wait(self) -> None:
        self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(0)
        self._process.join(10)
        self._process.kill()


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return [100 + (seed * 7919 + i * 31 + i // 7 * 5) % 40_000 for i in range(tokens)]


def gaps_of(engine: Engine, seed: int) -> list[float]:
    """Seconds between the tokens of one decoded sequence."""
    import httpx

    body = {
        "model": engine.spec.served_name, "prompt": prompt(seed, 64), "max_tokens": DECODED, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    times: list[float] = []
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


class Others:
    """The engine, its prompts, and the two sequences that are decoded meanwhile."""

    def __init__(self, engine: Engine, bytes_of_a_prompt: int) -> None:
        self.engine, self.nbytes = engine, bytes_of_a_prompt
        self.copier = Copier(bytes_of_a_prompt)
        self._turn = 0

    def round(self, restoring: bool) -> tuple[list[float], int]:
        """The gaps of both sequences while prompts come back, and how many came."""
        found: list[list[float]] = []
        threads = [
            threading.Thread(target=lambda s=seed: found.append(gaps_of(self.engine, 1_000 + s))) for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        asked = 0
        while any(thread.is_alive() for thread in threads):
            seed = self._turn % TURNS_TIER if restoring else TURNS_TIER + self._turn % TURNS_POOL
            self._turn += 1
            if not restoring:
                self.copier.copy(self.nbytes)
            self.engine.complete(prompt(seed), 1)
            if not restoring:
                self.copier.wait()
            asked += 1
            time.sleep(0.1)
        return [gap for gaps in found for gap in gaps], asked


@contextmanager
def engine_of(directory: Path, tokens_a_block: int = 128) -> Iterator[Engine]:
    blocks = (POOL_BLOCKS_SHARE * PROMPT_TOKENS + 2 * (DECODED + 64)) // tokens_a_block + 8
    transfer = {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_connector_module_path": "lmcache_nvme_backend",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "NvmeOffloadingSpec",
            "spec_module_path": "lmcache_nvme_backend",
            "root_dir": str(directory),
            "quota_gib": 4,
            "staging_mib": 64,
            "blocks_per_chunk": 2,
        },
    }
    spec = EngineSpec(
        model=find_model(None, lambda _: None),
        log=directory / "engine.log",
        max_model_len=6_000,
        max_num_batched_tokens=512,
        args=(
            "--kv-transfer-config", json.dumps(transfer), "--num-gpu-blocks-override", str(blocks),
            "--block-size", str(tokens_a_block),
        ),
        ready_timeout_s=900,
    )  # fmt: skip
    engine = Engine(spec)
    try:
        yield engine
    finally:
        engine.stop()


def others(rounds: int, directory: Path, say: Any) -> list[Row]:
    with engine_of(directory) as engine:
        say("storing the prompts …")
        for seed in range(TURNS_TIER + TURNS_POOL):
            engine.complete(prompt(seed), 1)
        read = engine.metrics().value("kvtier_bytes_read_total")
        engine.complete(prompt(0), 1)
        time.sleep(1)
        nbytes = int(engine.metrics().value("kvtier_bytes_read_total") - read)
        if nbytes <= 0:
            raise RuntimeError("the prompt was still in the pool: nothing came back from the drive")
        bench = Others(engine, nbytes)
        gaps: dict[str, list[list[float]]] = {"restore": [], "memcpy": []}
        came: dict[str, int] = {"restore": 0, "memcpy": 0}
        for turn in range(rounds):
            for kind in ("restore", "memcpy") if turn % 2 else ("memcpy", "restore"):
                say(f"two sequences beside a {kind}, round {turn + 1} of {rounds} …")
                if kind == "memcpy":  # in the pool from here on
                    engine.complete(prompt(TURNS_TIER), 1)
                one, asked = bench.round(kind == "restore")
                gaps[kind].append(one)
                came[kind] += asked
        bench.copier.end()
        rows = []
        for kind, each in gaps.items():
            flat = [gap for one in each for gap in one]
            rows.append(
                Row(
                    subject=SUBJECT if kind == "restore" else "memcpy",
                    operation="gap p99 beside it",
                    size=nbytes,
                    value=percentile(flat, 99) * 1000,
                    unit="ms",
                    samples=[percentile(one, 99) * 1000 for one in each],
                    note=f"median {percentile(flat, 50) * 1000:.0f} ms, {came[kind]} prompts, {len(flat)} gaps",
                )
            )
        rows[0].peer_ratio = median(a / b for a, b in zip(rows[0].samples or [], rows[1].samples or []))
        return rows


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def main(
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    gib: Annotated[float, typer.Option(min=0.05, help="Size of the context.")] = 2,
    chunks: Annotated[str, typer.Option(help="Chunk sizes in MiB.")] = "1,6",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    engine: Annotated[bool, typer.Option(help="What a restore costs others, in a real engine.")] = True,
    rate: Annotated[bool, typer.Option(help="Loads and stores beside fio.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """The native door at the drive's line, and beside sequences that are being decoded."""
    console = Console(width=max(112, Console().width))
    say = partial(console.print, style="dim")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="native-", dir=directory or Path.home()) as folder:
        for size in chunks.split(",") if rate else ():
            rows += rates(int(size), gib, rounds, Path(folder), say)
        if engine:
            (Path(folder) / "engine").mkdir()
            rows += others(rounds, Path(folder) / "engine", say)
        facts = machine(Path(folder))
    facts["fio"] = tool_version("fio")
    table = Table(title=f"NvmeOffloadingSpec: a context of {gib:g} GiB, {rounds} alternating rounds, medians")
    for column in ("size", "operation", "subject", "value", "of fio", "of memcpy", "held MiB", "CPU s/GB"):
        table.add_column(column, justify="left" if column in ("operation", "subject") else "right")
    for row in rows:
        table.add_row(
            f"{row.size / MIB:.0f} MiB", row.operation, row.subject + (f" ({row.note})" if row.note else ""),
            f"{row.value:.2f} {row.unit}", number(row.share_of_fio), number(row.peer_ratio),
            number(row.resident_mib, ".0f"), number(row.cpu_s_per_gb),
        )  # fmt: skip
    console.print(table)
    if json_file is not None:
        write_json(json_file, rows, facts, gib=gib, rounds=rounds, staging_mib=STAGING_MIB)


if __name__ == "__main__":
    typer.run(main)
