"""The doors side by side: time to first token after a restart, and the host memory each takes. Real vLLM on the CPU.

    python benchmarks/tiers.py [--only no-tier,nvme-tier,vllm-fs] [--model random] [--tokens 1024,4096] [--json FILE]

Every subject gets the same engine, documents and disk, and is alone on the machine while it is measured:

1. *Before*: it prefills and stores every document, and is stopped. The page cache is dropped.
2. *After*: it starts again, and every document goes to it once. How many tokens came from the tier is vLLM's own count.
3. Then the memory of the engine and of what belongs to it (an LMCache server) is read: the proportional set size of all
   its processes, so that a page that several have mapped counts once; less that of an engine without a tier.

A subject is one function below that starts it; `SUBJECTS` names them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from machine import drop_page_cache, machine
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from kvtier.engine import Engine, EngineSpec
from kvtier.lmcache_server import LmcacheServer, LmcacheServerSpec, nvme_adapter
from kvtier.model import find_model
from kvtier.process import KeptProcess

NONE = "no-tier"
PEERS = ("vllm-fs", "lmcache-mp-fs")  # what is not this project's
QUOTA_GIB = 20
TAIL_TOKENS = 16  # behind the last whole chunk: something is always computed
BLOCK_TOKENS = 128  # vLLM's on a CPU
PACKAGE = "lmcache_nvme_backend"


class Bench(msgspec.Struct, frozen=True):
    """What all subjects share."""

    model: Path
    folder: Path
    longest: int
    host_mib: int  # vLLM's host buffer, LMCache's L1 pool

    def chunks(self, subject: str) -> Path:
        path = self.folder / subject
        path.mkdir(exist_ok=True)
        return path

    def spec(self, name: str, transfer: dict[str, Any] | None) -> EngineSpec:
        args = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
        return EngineSpec(
            model=self.model,
            log=self.folder / f"{name}.log",
            max_model_len=self.longest + 256,
            kv_pool_gib=2,
            args=("--enable-prefix-caching", *args),
            env={"LMCACHE_LOG_LEVEL": "WARNING"},
            ready_timeout_s=900,
        )


class Running(msgspec.Struct, frozen=True):
    """An engine, and every process tree that is there because of it."""

    engine: Engine
    beside: tuple[KeptProcess, ...] = ()

    def settle(self) -> None:
        """Until what was stored has come to rest."""
        self.engine.settled_io()
        for process in self.beside:
            process.settled_io(quiet_s=1.5)

    def memory(self) -> dict[str, int]:
        """Proportional set size in bytes, of private memory and of shared memory."""
        total = {"Pss_Anon": 0, "Pss_Shmem": 0}
        for process in (self.engine.process, *self.beside):
            for pid in process.processes():
                try:
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                except OSError:
                    continue
                for line in lines:
                    name, _, rest = line.partition(":")
                    if name in total:
                        total[name] += int(rest.split()[0]) << 10
        return total


Start = Callable[[Bench, str, str], AbstractContextManager[Running]]


@contextmanager
def no_tier(bench: Bench, subject: str, name: str) -> Iterator[Running]:
    with Engine(bench.spec(name, None)) as engine:
        yield Running(engine)


def _tiering(entry: dict[str, Any], bench: Bench) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringOffloadingSpec",
            "spec_module_path": PACKAGE,
            "cpu_bytes_to_use": bench.host_mib << 20,
            "secondary_tiers": [entry],
        },
    }


@contextmanager
def _with_tiering(entry: dict[str, Any], bench: Bench, name: str) -> Iterator[Running]:
    spec = bench.spec(name, _tiering(entry, bench))
    try:
        with Engine(spec) as engine:
            yield Running(engine)
    finally:  # vLLM leaves its map behind
        for path in re.findall(r"/dev/shm/vllm_offload_\S+?\.mmap", spec.log.read_text(errors="replace")):
            Path(path).unlink(missing_ok=True)


def nvme_tier(bench: Bench, subject: str, name: str) -> AbstractContextManager[Running]:
    entry = {"type": "NvmeTier", "module_path": PACKAGE, "quota_gib": QUOTA_GIB}
    return _with_tiering(entry | {"root_dir": str(bench.chunks(subject))}, bench, name)


def vllm_fs(bench: Bench, subject: str, name: str) -> AbstractContextManager[Running]:
    return _with_tiering({"type": "fs", "root_dir": str(bench.chunks(subject))}, bench, name)


@contextmanager
def nvme_spec(bench: Bench, subject: str, name: str) -> Iterator[Running]:
    transfer = {
        "kv_connector": "NvmeOffloadingConnector",
        "kv_connector_module_path": PACKAGE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "NvmeOffloadingSpec",
            "spec_module_path": PACKAGE,
            "root_dir": str(bench.chunks(subject)),
            "quota_gib": QUOTA_GIB,
        },
    }
    with Engine(bench.spec(name, transfer)) as engine:
        yield Running(engine)


@contextmanager
def _with_server(adapter: dict[str, Any], bench: Bench, name: str) -> Iterator[Running]:
    log = bench.folder / f"{name}-server.log"
    spec = LmcacheServerSpec(log=log, l2_adapters=(adapter,), l1_gb=max(1.0, bench.host_mib / 1024))
    with LmcacheServer(spec) as server, Engine(bench.spec(name, server.kv_transfer)) as engine:
        yield Running(engine, (server.process,))


def nvme_mp(bench: Bench, subject: str, name: str) -> AbstractContextManager[Running]:
    return _with_server(nvme_adapter(bench.chunks(subject), QUOTA_GIB), bench, name)


def lmcache_mp_fs(bench: Bench, subject: str, name: str) -> AbstractContextManager[Running]:
    return _with_server({"type": "fs", "base_path": str(bench.chunks(subject))}, bench, name)


SUBJECTS: dict[str, Start] = {
    NONE: no_tier,
    "nvme-tier": nvme_tier,
    "vllm-fs": vllm_fs,
    "nvme-spec": nvme_spec,
    "nvme-mp": nvme_mp,
    "lmcache-mp-fs": lmcache_mp_fs,
}


def documents(lengths: list[int], rounds: int, vocabulary: int) -> list[list[int]]:
    """Whole blocks and a tail each, none beginning like another; the first only warms the loading up."""
    numbers = random.Random(1)
    wanted = [lengths[0]] + [length for _ in range(rounds) for length in lengths]
    return [
        [numbers.randrange(64, vocabulary) for _ in range(length // BLOCK_TOKENS * BLOCK_TOKENS + TAIL_TOKENS)]
        for length in wanted
    ]


class Found(msgspec.Struct):
    """One subject after its restart. `ttft` by document; `loaded` is the share of the documents that it brought."""

    ttft: list[float]
    loaded: float
    memory: dict[str, int]
    ready_s: float


def measure(bench: Bench, subject: str, docs: list[list[int]], say: Callable[[str], None]) -> Found:
    start = SUBJECTS[subject]
    if subject != NONE:
        say(f"{subject}: prefilling and storing {len(docs)} documents …")
        with start(bench, subject, f"{subject}-before") as running:
            _warm_up(running.engine)
            for doc in docs:
                running.engine.complete(doc, 1)
            running.settle()
    drop_page_cache(bench.folder)
    say(f"{subject}: after the restart …")
    with start(bench, subject, f"{subject}-after") as running:
        _warm_up(running.engine)
        before = _external(running.engine)
        ttft = [running.engine.complete(doc, 1).ttft_s for doc in docs]
        brought = _external(running.engine) - before
        running.settle()
        return Found(ttft, brought / sum(map(len, docs)), running.memory(), running.engine.ready_s)


def _warm_up(engine: Engine) -> None:
    """What an engine's first request pays for: shorter than a block, so that nothing of it is stored."""
    for _ in range(2):
        engine.complete(list(range(64, 64 + BLOCK_TOKENS // 2)), 1)


def _external(engine: Engine) -> float:
    return engine.metrics().value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def rows_of(found: dict[str, Found], docs: list[list[int]]) -> list[Row]:
    lengths = sorted({len(doc) for doc in docs[1:]})
    rows: list[Row] = []
    for length in lengths:
        samples = {s: [t for t, doc in list(zip(f.ttft, docs))[1:] if len(doc) == length] for s, f in found.items()}
        peer = min((median(samples[p]) for p in PEERS if p in samples), default=None)
        for subject, times in samples.items():
            ratio = None if peer is None or subject in (NONE, *PEERS) else median(times) / peer
            rows.append(Row(subject, "ttft after restart", length, median(times), "s", peer_ratio=ratio, samples=times))
    base = found.get(NONE)
    for subject, one in found.items():
        rows.append(Row(subject, "first load", len(docs[0]), one.ttft[0], "s"))
        rows.append(Row(subject, "tokens from the tier", sum(map(len, docs)), one.loaded, "share"))
        for kind, name in (("Pss_Anon", "private host memory"), ("Pss_Shmem", "shared host memory")):
            over = one.memory[kind] - (base.memory[kind] if base is not None else 0)
            note = "above no tier's" if base is not None else "whole"
            rows.append(Row(subject, name, 0, over / 2**20, "MiB", note=note))
    return rows


def table(rows: list[Row], subjects: list[str], title: str) -> Table:
    lengths = sorted({row.size for row in rows if row.operation == "ttft after restart"})
    by = {(row.subject, row.operation, row.size): row for row in rows}
    shown = Table(title=title)
    for column in (
        "subject",
        *(f"{n:,} tokens, s" for n in lengths),
        "of the best peer",
        "from the tier",
        "private MiB",
        "shared MiB",
    ):
        shown.add_column(column, justify="left" if column == "subject" else "right")

    def value(subject: str, operation: str) -> float | None:
        return next((row.value for row in rows if (row.subject, row.operation) == (subject, operation)), None)

    for subject in subjects:
        times = [by[subject, "ttft after restart", n] for n in lengths]
        shown.add_row(
            subject, *(number(row.value, ".3f") for row in times), number(times[-1].peer_ratio),
            number(value(subject, "tokens from the tier"), ".0%"),
            number(value(subject, "private host memory"), ",.0f"), number(value(subject, "shared host memory"), ",.0f"),
        )  # fmt: skip
    return shown


def main(
    only: Annotated[str, typer.Option(help=f"Of: {', '.join(SUBJECTS)}.")] = ",".join(SUBJECTS),
    model: Annotated[str | None, typer.Option(help="`random`, or a folder; default: SmolLM2-135M.")] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the documents.")] = "1024,4096",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    host_mib: Annotated[
        int, typer.Option(min=64, help="vLLM's host buffer, and LMCache's L1 pool from 1 GiB on.")
    ] = 256,
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """After a restart: how soon the first token comes through each door, and what host memory the door takes."""
    console = Console(width=max(120, Console().width))
    say: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    subjects = only.split(",")
    if unknown := [subject for subject in subjects if subject not in SUBJECTS]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(SUBJECTS)}", param_hint="--only")
    checkpoint = find_model(model, say)
    vocabulary = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
    lengths = sorted(map(int, tokens.split(",")))
    docs = documents(lengths, rounds, vocabulary)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=directory or Path.home())))
        bench = Bench(checkpoint, folder, lengths[-1], host_mib)
        try:
            found = {subject: measure(bench, subject, docs, say) for subject in subjects}
        except Exception:
            kept = Path(tempfile.mkdtemp(prefix="tiers-logs-"))
            for log in folder.glob("*.log"):
                shutil.copy(log, kept)
            console.print(f"the logs are kept in {kept}")
            raise
        facts = machine(folder)
    rows = rows_of(found, docs)
    console.print(table(rows, subjects, f"After a restart, {checkpoint.name}, medians of {rounds} rounds"))
    for subject, one in found.items():
        if subject != NONE and one.loaded < 0.9:
            say(f"{subject}: only {one.loaded:.0%} of the tokens came from the tier: these are not all times of hits")
    if json_file is not None:
        write_json(json_file, rows, facts, model=checkpoint.name, rounds=rounds, host_mib=host_mib)


if __name__ == "__main__":
    typer.run(main)
