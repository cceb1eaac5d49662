"""Time to first token after a restart, and what storing costs the engine: real vLLM on the CPU.

    python benchmarks/engine_ttft.py [--model random] [--tokens 1024,4096,8000] [--rounds 3] [--json FILE]

Three subjects: no tier, this tier, and LMCache's multi-process server with its fs adapter (what LMCache recommends in
place of the in-process mode). Documents are random token ids, another one for every round and length.

1. *Before*: each tier's engine prefills and stores every document; what storing took of its steps is read from
   `kvtier_store_seconds_total` (time on the worker's thread from the end of the forward pass to the end of the step).
2. Engines and LMCache's server are stopped, and the page cache is dropped.
3. *After*: all three engines are up, and every document goes to each of them once, in turns.

The break-even is the shortest prefix that comes sooner from the tier than by prefill, the tail of 16 tokens included.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
import yaml
from machine import drop_page_cache, machine
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from kvtier.demo_doors import lmcache_config
from kvtier.doors import PLUGIN_TRANSFER
from kvtier.engine import Engine, EngineSpec
from kvtier.lmcache_server import LmcacheServer, LmcacheServerSpec
from kvtier.model import find_model

CHUNK_TOKENS = 256
TAIL_TOKENS = 16  # after the last whole chunk: something is always computed
SHORT_CHUNKS = (1, 2, 3)  # where the break-even is looked for, besides the lengths asked for
NONE, TIER, PEER = "no-tier", "nvme-backend", "lmcache-mp-fs"
# The rates of new KV at which the cost of storing is told, in bytes a second.
RATES = (100_000_000, 1_000_000_000)


class Document(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    round: int


def documents(lengths: list[int], rounds: int, vocabulary: int, seed: int = 1) -> list[Document]:
    """A whole number of chunks and a tail each, none beginning like another."""
    rng = random.Random(seed)
    return [
        Document(
            tuple(rng.randrange(64, vocabulary) for _ in range(length // CHUNK_TOKENS * CHUNK_TOKENS + TAIL_TOKENS)), i
        )
        for i in range(rounds)
        for length in lengths
    ]


class Bench:
    """Starts a subject's engine; a folder for the logs, one for each tier's chunks."""

    def __init__(self, model: Path, folder: Path, longest: int) -> None:
        self._model, self._folder = model, folder
        self._longest = longest
        self.chunks = {subject: folder / subject for subject in (TIER, PEER)}
        for path in self.chunks.values():
            path.mkdir()
        (folder / "lmcache.yaml").write_text(yaml.safe_dump(lmcache_config(self.chunks[TIER], 20)))

    def _spec(self, name: str, **more: Any) -> EngineSpec:
        return EngineSpec(
            model=self._model,
            log=self._folder / f"{name}.log",
            max_model_len=self._longest + CHUNK_TOKENS,
            kv_pool_gib=2,
            **more,
        )

    @contextmanager
    def running(self, subject: str, name: str) -> Iterator[Engine]:
        with ExitStack() as stack:
            if subject == TIER:
                spec = self._spec(
                    name, lmcache_config=self._folder / "lmcache.yaml", env={"LMCACHE_LOG_LEVEL": "WARNING"}
                )
            elif subject == PEER:
                server = stack.enter_context(self._server(f"{name}-server.log"))
                extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
                transfer = PLUGIN_TRANSFER | {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
                spec = self._spec(
                    name, args=("--kv-transfer-config", json.dumps(transfer)), env={"LMCACHE_LOG_LEVEL": "WARNING"}
                )
                self.peer_server = server
            else:
                spec = self._spec(name)
            yield stack.enter_context(Engine(spec))

    def _server(self, log: str) -> LmcacheServer:
        adapter = {"type": "fs", "base_path": str(self.chunks[PEER])}
        env: dict[str, str | None] = {"LMCACHE_LOG_LEVEL": "WARNING"}
        return LmcacheServer(LmcacheServerSpec(log=self._folder / log, l2_adapters=(adapter,), env=env))

    def settle(self, engine: Engine, subject: str) -> None:
        """Until what the engine stored has come to rest."""
        engine.settled_io()
        if subject == PEER:
            self.peer_server.process.settled_io(quiet_s=1.5)


def ask(engine: Engine, tokens: tuple[int, ...]) -> float:
    """Seconds to the first token."""
    return engine.complete(list(tokens), 1).ttft_s


def warm_up(engine: Engine, vocabulary: int) -> None:
    """What an engine's first request pays for: shorter than a chunk, so that nothing of it is stored."""
    for i in range(2):
        ask(engine, tuple(64 + (31 * j + i) % (vocabulary - 64) for j in range(200)))


def tokens_by_source(engine: Engine) -> dict[str, float]:
    metrics = engine.metrics()
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: metrics.value("vllm:prompt_tokens_by_source_total", source=source) for source in sources}


class Before(msgspec.Struct):
    """What filling a tier told: prefill times by document, and the cost of storing."""

    ttft: dict[Document, float]
    store_s: float = 0.0
    wait_s: float = 0.0
    stored_bytes: float = 0.0
    elapsed_s: float = 0.0


def fill(bench: Bench, subject: str, docs: list[Document], vocabulary: int, say: Callable[[str], None]) -> Before:
    with bench.running(subject, f"{subject}-before") as engine:
        warm_up(engine, vocabulary)
        say(f"{subject}: prefilling and storing {len(docs)} documents …")
        # The first stores touch the ring's memory for the first time: not what they cost later.
        ttft = {docs[0]: ask(engine, docs[0].tokens)}
        bench.settle(engine, subject)
        before = _tier_counts(engine) if subject == TIER else {}
        began = time.perf_counter()
        ttft |= {doc: ask(engine, doc.tokens) for doc in docs[1:]}
        elapsed = time.perf_counter() - began
        bench.settle(engine, subject)
        found = Before(ttft, elapsed_s=elapsed)
        if subject == TIER:
            after = _tier_counts(engine)
            took = {name: after[name] - before[name] for name in after}
            if took["kvtier_chunks_dropped_total"]:
                say(f"{took['kvtier_chunks_dropped_total']:.0f} chunks were dropped")
            found.store_s, found.wait_s = took["kvtier_store_seconds_total"], took["kvtier_store_wait_seconds_total"]
            found.stored_bytes = took["kvtier_bytes_written_total"]
        return found


def _tier_counts(engine: Engine) -> dict[str, float]:
    metrics = engine.metrics()
    names = ("kvtier_store_seconds_total", "kvtier_store_wait_seconds_total", "kvtier_bytes_written_total")
    return {name: metrics.value(name) for name in (*names, "kvtier_chunks_dropped_total")}


def serve(
    bench: Bench, subjects: list[str], docs: list[Document], vocabulary: int, say: Callable[[str], None]
) -> dict[str, dict[Document, float]]:
    """The documents after the restart, each to every engine in turn. The first document only warms the loading up."""
    with ExitStack() as stack:
        engines = {}
        for subject in subjects:
            say(f"{subject}: starting again …")
            engines[subject] = stack.enter_context(bench.running(subject, f"{subject}-after"))
            warm_up(engines[subject], vocabulary)
        ttft: dict[str, dict[Document, float]] = {subject: {} for subject in subjects}
        for number_of_doc, doc in enumerate(docs):
            say(f"document {number_of_doc + 1} of {len(docs)}, {len(doc.tokens)} tokens …")
            for i in range(len(subjects)):
                subject = subjects[(i + number_of_doc) % len(subjects)]
                ttft[subject][doc] = ask(engines[subject], doc.tokens)
        stored = sum(len(doc.tokens) - TAIL_TOKENS for doc in docs)
        for subject in subjects:
            loaded = tokens_by_source(engines[subject])["external_kv_transfer"]
            if subject != NONE and loaded < 0.95 * stored:
                say(f"{subject}: only {loaded:.0f} of {stored} tokens came from the tier: these are no times of hits")
        return ttft


def ttft_rows(after: dict[str, dict[Document, float]], docs: list[Document]) -> list[Row]:
    rows = []
    for length in sorted({len(doc.tokens) for doc in docs}):
        of_length = [doc for doc in docs if len(doc.tokens) == length]
        times = {subject: [found[doc] for doc in of_length] for subject, found in after.items()}
        for subject, samples in times.items():
            ratio = None
            if subject != PEER and PEER in times:  # round by round
                ratio = median(mine / peer for mine, peer in zip(samples, times[PEER], strict=True))
            rows.append(
                Row(subject, "ttft after restart", length, median(samples), "s", peer_ratio=ratio, samples=samples)
            )
    return rows


class BreakEven(msgspec.Struct):
    """`tokens`: the shortest prefix that comes sooner from the tier, a whole number of chunks; None where none does.

    The rates come from the lengths measured: prefill and load by the slope between the shortest and the longest,
    `load_fixed_s` is what a load costs beside that, both without the tail.
    """

    tokens: int | None
    prefill_tokens_per_s: float
    load_tokens_per_s: float
    load_fixed_s: float


def break_even(rows: list[Row]) -> BreakEven | None:
    times = {(row.subject, row.size): row.value for row in rows}
    lengths = sorted({row.size for row in rows})
    if len(lengths) < 2 or (TIER, lengths[0]) not in times or (NONE, lengths[0]) not in times:
        return None
    wins = [times[TIER, length] < times[NONE, length] for length in lengths]
    first = next((i for i in range(len(lengths)) if all(wins[i:])), None)
    span = lengths[-1] - lengths[0]
    prefill = span / max(times[NONE, lengths[-1]] - times[NONE, lengths[0]], 1e-9)
    load = span / max(times[TIER, lengths[-1]] - times[TIER, lengths[0]], 1e-9)
    fixed = times[TIER, lengths[0]] - (lengths[0] - TAIL_TOKENS) / load - TAIL_TOKENS / prefill
    tokens = None if first is None else lengths[first] - TAIL_TOKENS
    return BreakEven(tokens, prefill, load, max(0.0, fixed))


def store_rows(before: dict[str, Before], without: dict[Document, float], docs: list[Document]) -> list[Row]:
    tier = before[TIER]
    rows = []
    if tier.stored_bytes:
        cost = tier.store_s / tier.stored_bytes
        for rate in RATES:
            rows.append(Row(TIER, "share of step time, storing", rate, cost * rate, "share at size bytes/s"))
        rows.append(
            Row(
                TIER,
                "share of step time, storing",
                int(tier.stored_bytes / tier.elapsed_s),
                tier.store_s / tier.elapsed_s,
                "share as it ran",
            )
        )
    for subject, found in before.items():
        ratio = median(found.ttft[doc] / without[doc] for doc in docs)
        tokens = sum(len(doc.tokens) for doc in docs)
        rows.append(
            Row(
                subject,
                "cold prefill, storing",
                tokens,
                tokens / sum(found.ttft[doc] for doc in docs),
                "tokens/s",
                note=f"time {ratio:.2f} of no tier's",
            )
        )
    rows.append(Row(NONE, "cold prefill", tokens, tokens / sum(without[doc] for doc in docs), "tokens/s"))
    return rows


def main(
    model: Annotated[str | None, typer.Option(help="`random`, or a folder; default: SmolLM2-135M.")] = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the documents.")] = "1024,4096,7936",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    peer: Annotated[bool, typer.Option(help="LMCache's multi-process server, too.")] = True,
    directory: Annotated[Path | None, typer.Option(help="On the drive to measure; default: the home folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """After a restart: how soon the first token comes, from which length on a tier pays, and what storing costs."""
    console = Console(width=max(110, Console().width))
    say: Callable[[str], None] = lambda text: console.print(text, style="dim")  # noqa: E731
    checkpoint = find_model(model, say)
    vocabulary = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
    lengths = sorted({*(chunks * CHUNK_TOKENS for chunks in SHORT_CHUNKS), *map(int, tokens.split(","))})
    docs = documents([lengths[-1]], 1, vocabulary, seed=2) + documents(lengths, rounds, vocabulary)
    tiers = [TIER, *([PEER] if peer else [])]
    with tempfile.TemporaryDirectory(prefix="engine-ttft-", dir=directory or Path.home()) as folder:
        try:
            bench = Bench(checkpoint, Path(folder), lengths[-1])
            before = {subject: fill(bench, subject, docs, vocabulary, say) for subject in tiers}
            drop_page_cache(Path(folder))
            after = serve(bench, [NONE, *tiers], docs, vocabulary, say)
        except Exception:
            kept = Path(tempfile.mkdtemp(prefix="engine-ttft-logs-"))
            for log in Path(folder).glob("*.log"):
                shutil.copy(log, kept)
            console.print(f"the logs are kept in {kept}")
            raise
        facts = machine(Path(folder))
    measured = docs[1:]
    rows = ttft_rows(after, measured)
    even = break_even(rows)
    rows += store_rows(before, after[NONE], measured)
    console.print(ttft_table(rows, rounds, checkpoint.name))
    console.print(cost_table(rows))
    first = {subject: after[subject][docs[0]] for subject in tiers}
    console.print("the very first load after the restart: " + ", ".join(f"{s} {t:.2f} s" for s, t in first.items()))
    if even is not None:
        console.print(
            f"break-even: {even.tokens or 'beyond the lengths measured'} tokens; "
            f"prefill {even.prefill_tokens_per_s:,.0f} tokens/s, "
            f"load {even.load_tokens_per_s:,.0f} tokens/s after {even.load_fixed_s * 1000:.0f} ms"
        )
    if json_file is not None:
        write_json(json_file, rows, facts, model=checkpoint.name, rounds=rounds, break_even=even, first_load_s=first)


def ttft_table(rows: list[Row], rounds: int, model: str) -> Table:
    table = Table(title=f"Time to first token after a restart, {model}, medians of {rounds} rounds in turns")
    for column in ("tokens", "subject", "seconds", "of no tier", "of LMCache's server"):
        table.add_column(column, justify="left" if column == "subject" else "right")
    none = {row.size: row.value for row in rows if row.subject == NONE}
    shown = [row for row in rows if row.operation == "ttft after restart"]
    for row in shown:
        table.add_row(
            f"{row.size:,}",
            row.subject,
            number(row.value, ".3f"),
            number(row.value / none[row.size]),
            number(row.peer_ratio),
        )
    return table


def cost_table(rows: list[Row]) -> Table:
    table = Table(title="What storing costs the engine's thread")
    for column in ("what", "value", "unit"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for row in rows:
        if row.operation.startswith("share"):
            table.add_row(
                f"{row.subject}: {row.operation}, {row.size / 1e6:,.0f} MB/s of new KV",
                f"{row.value:.2%}",
                row.unit.split(" ")[0],
            )
        elif row.operation.startswith("cold"):
            table.add_row(f"{row.subject}: {row.operation}", f"{row.value:,.0f}", f"{row.unit} {row.note or ''}")
    return table


if __name__ == "__main__":
    typer.run(main)
