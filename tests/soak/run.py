"""The soak itself: one engine under faults, then one without any that says what was right."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml

from kvtier.engine import Engine, EngineSpec
from tests.soak.comparison import Answers, Chunks, compare_answers, compare_chunks
from tests.soak.faults import Faults
from tests.soak.mount import small_disk
from tests.soak.sessions import Sessions

EXAMPLE = Path(__file__).parents[2] / "configs/examples/lmcache-nvme.yaml"
DISK_MIB, QUOTA_MIB = 320, 256
# 140 blocks of 32 tokens are less than four histories, so that most of each comes from the tier.
SMALL_POOL = ("--num-gpu-blocks-override", "140")
ARGUMENTS = ("--dtype", "float32", "--block-size", "32", "--max-num-seqs", "4")
# The engine's own caches fill within this part of the run; memory is compared from there on.
WARM_UP = 0.25


class Report(msgspec.Struct, frozen=True):
    """What came of it. ``memory_growth_mib``: resident memory of all of the engine's processes, end against warm-up."""

    seconds: float
    requests: int
    failures: list[str]
    faults: dict[str, int]
    answers: Answers
    chunks: Chunks
    tokens_from_tier: int
    chunks_corrupt: int
    chunks_load_failed: int
    memory_growth_mib: float


def soak(folder: Path, model: Path, seconds: float, seed: int = 1) -> Report:
    """Run the engine under faults for ``seconds``, then compare. ``folder`` is empty and on a disk."""
    with small_disk(folder, DISK_MIB) as disk:
        root = (disk.path if disk is not None else folder) / "kv"
        root.mkdir()
        with _engine(folder / "soaked", model, root, SMALL_POOL) as engine:
            with Memory(engine) as memory, Faults(root, disk, seed) as faults:
                sessions = Sessions(engine, seconds, seed)
                sessions.run()
            time.sleep(2.0)  # metrics are exported four times a second
            metrics = engine.metrics()
        right = folder / "right"
        right.mkdir()
        with _engine(folder / "reference", model, right, ("--num-gpu-blocks-override", "30000")) as reference:
            answers = compare_answers(reference, sessions.turns)
            loaded = reference.metrics().value("kvtier_chunks_loaded_total")
            assert loaded <= 1, "the reference must compute everything itself; only its self-test reads"
        chunks = compare_chunks(root, right)
    return Report(
        seconds=seconds,
        requests=len(sessions.turns) + len(sessions.failures),
        failures=sessions.failures,
        faults=dict(faults.done),
        answers=answers,
        chunks=chunks,
        tokens_from_tier=int(metrics.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")),
        chunks_corrupt=int(metrics.value("kvtier_chunks_corrupt_total")),
        chunks_load_failed=int(metrics.value("kvtier_chunks_load_failed_total")),
        memory_growth_mib=memory.growth_mib(),
    )


@contextmanager
def _engine(folder: Path, model: Path, root: Path, pool: tuple[str, ...]) -> Iterator[Engine]:
    folder.mkdir()
    config = yaml.safe_load(EXAMPLE.read_text())
    # The reference keeps everything; the quota of the other is what makes it evict.
    quota_gib = QUOTA_MIB / 1024 if pool is SMALL_POOL else 64
    config["extra_config"] |= {"nvme.path": str(root), "nvme.quota_gib": quota_gib, "nvme.staging_mib": 16}
    (folder / "lmcache.yaml").write_text(yaml.safe_dump(config))
    spec = EngineSpec(
        model=model,
        log=folder / "engine.log",
        lmcache_config=folder / "lmcache.yaml",
        args=(*ARGUMENTS, *pool),
        env={"VLLM_SERVER_DEV_MODE": "1"},
        max_model_len=4096,
        max_num_batched_tokens=1024,
        kv_pool_gib=4,
    )
    with Engine(spec) as engine:
        yield engine


class Memory:
    """Resident memory of an engine's processes, sampled once a second."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._samples = engine, [_resident(engine)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            self._samples.append(_resident(self._engine))

    def growth_mib(self) -> float:
        """From the end of the warm-up to the end, each the mean of some samples."""
        start = int(len(self._samples) * WARM_UP)
        few = max(1, len(self._samples) // 20)
        first, last = self._samples[start : start + few], self._samples[-few:]
        return (sum(last) / len(last) - sum(first) / len(first)) / 2**20


def _resident(engine: Engine) -> int:
    total = 0
    for pid in engine.process.processes():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def as_json(report: Report) -> str:
    return json.dumps(msgspec.to_builtins(report), indent=1)
