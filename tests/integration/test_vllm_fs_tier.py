"""`kvtier store` on the root of vLLM's own fs tier: trees made, and read again, by vLLM's own code."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from typer.testing import CliRunner
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import ScheduleEndContext, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvtier import cli
from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings
from lmcache_nvme_backend.store.pruning import Selection, plan, prune
from lmcache_nvme_backend.store.survey import DAY_S
from lmcache_nvme_backend.store.trees import find_trees
from lmcache_nvme_backend.store.vllm_tree import VllmTree

BLOCK = 8192
BLOCKS = 6


class Tier:
    """vLLM's FileSystemTierManager with a CPU pool of a few blocks."""

    def __init__(self, root: Path, model: str, tp: int = 1, rank: int = 0, agnostic: bool = False) -> None:
        parallel = OffloadingParallelConfig(
            rank=rank, world_size=tp, tp_size=tp, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=agnostic,
        )  # fmt: skip
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),), worker_kv_bytes_per_block=BLOCK,
            enable_kv_cache_events=False, extra_config={}, engine_id="e", parallel=parallel,
            model=OffloadingModelConfig(model, "bfloat16"), cache=OffloadingCacheConfig(16, 1),
        )  # fmt: skip
        self.pool = memoryview(mmap.mmap(-1, BLOCKS * BLOCK)).cast("B", (BLOCKS, BLOCK))
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self.manager = FileSystemTierManager(spec, self.pool, "fs", str(root), n_read_threads=1, n_write_threads=1)
        self.request = ReqContext(req_id="r")
        self._jobs = 0

    def fill(self) -> bytes:
        """New noise in the pool; returns it."""
        data = os.urandom(BLOCKS * BLOCK)
        self.pool.cast("B")[:] = data
        return data

    def store(self, keys: list[Any]) -> bool:
        return self._finish(self.manager.submit_store, keys)

    def load(self, keys: list[Any]) -> bool:
        return self._finish(self.manager.submit_load, keys)

    def _finish(self, submit: Any, keys: list[Any]) -> bool:
        self._jobs += 1
        ids: Any = list(range(len(keys)))
        submit(TransferJob(self._jobs, keys, ids, submit == self.manager.submit_load, self.request))
        self.manager.drain_jobs()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for result in self.manager.get_finished_jobs():
                return bool(result.success)
        raise AssertionError("the job did not finish")

    def lookup(self, key: Any) -> LookupResult:
        """Asked as the scheduler asks: again until the answer is there."""
        deadline = time.monotonic() + 30
        while (found := self.manager.lookup(key, self.request)) is LookupResult.RETRY and time.monotonic() < deadline:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
        return found

    def forget(self) -> None:
        """The request is over: its next lookup asks the disk again."""
        self.manager.on_request_finished(self.request)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Any]:
    """A factory of tiers on one root; all are shut down with the test."""
    made: list[Tier] = []

    def make(*arguments: Any, **named: Any) -> Tier:
        made.append(Tier(tmp_path, *arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.manager.shutdown()


def keys(name: str, count: int = BLOCKS) -> list[Any]:
    return [make_offload_key(bytes([i]) * 4 + name.encode().ljust(28, b"."), i % 2) for i in range(count)]


def tree_at(root: Path) -> VllmTree:
    (tree,) = find_trees(root)
    assert isinstance(tree, VllmTree)
    return tree


def pruned(root: Path, **conditions: Any) -> tuple[int, int]:
    tree = tree_at(root)
    done = prune(tree, plan(tree, Selection(unused_s=14 * DAY_S, **conditions)))
    assert done.failed == 0
    return done.chunks, done.nbytes


def age(root: Path, days: float, model: str) -> None:
    then = time.time() - days * DAY_S
    for folder in root.glob(f"{model}_*"):
        for path in sorted(folder.rglob("*"), reverse=True):
            os.utime(path, (then, then))
        os.utime(folder, (then, then))


def test_configurations_are_told_apart_with_model_ranks_and_sizes(tmp_path, tier):
    """Two models, one of them on two ranks: what vLLM's own code has written is all found, and nothing else is."""
    for made in (tier("org/model", tp=2, rank=0), tier("org/model", tp=2, rank=1), tier("other", agnostic=True)):
        made.fill()
        assert made.store(keys("found"))
    (tmp_path / "mine.txt").write_bytes(b"x" * 10)
    found = tree_at(tmp_path).survey(14 * DAY_S)
    by_model = {part.model_name: part for part in found.parts}
    assert {model: (part.chunks, part.nbytes) for model, part in by_model.items()} == {
        "org/model": (2 * BLOCKS, 2 * BLOCKS * BLOCK),
        "other": (BLOCKS, BLOCKS * BLOCK),
    }
    assert by_model["org/model"].facts["tp_size"] == 2 and by_model["org/model"].recency[0].chunks == 2 * BLOCKS
    assert found.ledgers is None and found.foreign_bytes == 10 and found.temporaries == 0


def test_an_engine_takes_what_was_pruned_for_a_miss(tmp_path, tier):
    """Looked up before and loaded after: that load fails alone and vLLM computes; the next lookup misses; storing it
    again works, and brings back the same bytes."""
    engine = tier("model")
    data, wanted = engine.fill(), keys("pruned")
    assert engine.store(wanted)
    assert engine.lookup(wanted[0]) is LookupResult.HIT
    assert pruned(tmp_path, keep_bytes=0) == (BLOCKS, BLOCKS * BLOCK)
    assert not engine.load(wanted[:1])
    engine.forget()
    assert engine.lookup(wanted[0]) is LookupResult.MISS
    engine.pool.cast("B")[:] = data
    assert engine.store(wanted)
    engine.fill()
    assert engine.load(wanted) and bytes(engine.pool.cast("B")) == data


def test_a_configuration_that_is_stale_goes_with_its_folders_and_a_live_one_does_not(tmp_path, tier):
    """Nothing is left of the one; the other can be stored to at once, also where its folders went while it idled."""
    for model in ("stale", "fresh"):
        made = tier(model)
        made.fill()
        assert made.store(keys(model))
    age(tmp_path, 20, "stale")
    (part,) = [part for part in tree_at(tmp_path).survey(14 * DAY_S).parts if part.stale]
    assert part.model_name == "stale"
    assert pruned(tmp_path, stale=True) == (BLOCKS, BLOCKS * BLOCK)
    assert not list(tmp_path.glob("stale_*")) and len(list(tmp_path.glob("fresh_*"))) == 2
    assert pruned(tmp_path, namespace="fresh") == (BLOCKS, BLOCKS * BLOCK)
    assert len(list(tmp_path.glob("fresh_*"))) == 2
    made.fill()
    assert made.store(keys("fresh"))
    age(tmp_path, 20, "fresh")
    assert pruned(tmp_path, older_than_s=DAY_S) == (BLOCKS, BLOCKS * BLOCK)
    made.fill()
    assert made.store(keys("again")) and made.load(keys("again"))


def test_age_and_size_choose_the_longest_unused_blocks(tmp_path, tier):
    """Of two configurations the idle one goes first; within one the oldest blocks."""
    for model in ("idle", "busy"):
        made = tier(model)
        made.fill()
        assert made.store(keys(model))
    age(tmp_path, 5, "idle")
    assert pruned(tmp_path, keep_bytes=(BLOCKS + 2) * BLOCK) == (BLOCKS - 2, (BLOCKS - 2) * BLOCK)
    assert len(list(tmp_path.glob("idle_*/*/*/*.bin"))) == 2 and len(list(tmp_path.glob("busy_*/*/*/*.bin"))) == BLOCKS
    old = sorted(tmp_path.glob("busy_*/*/*/*.bin"))[:3]
    for path in old:
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    assert pruned(tmp_path, older_than_s=DAY_S, namespace="busy") == (3, 3 * BLOCK)
    assert not any(path.exists() for path in old)


def test_only_blocks_and_old_temporaries_of_the_tier_are_ever_removed(tmp_path, tier):
    """A file of somebody's, a link out of the root, a write in flight: all stay; what a crash left an hour ago goes."""
    made = tier("model")
    made.fill()
    assert made.store(keys("mine"))
    block = next(tmp_path.glob("model_*/*/*/*.bin"))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / block.name).write_bytes(b"not yours")
    folder = block.parent
    (folder / "notes.bin").write_text("x")
    (folder / f"{'0' * 64}.bin").write_text("in another hash's folder")
    young, old = folder / f"{block.name}_1.tmp", folder / f"{block.name}_2.tmp"
    young.write_text("in flight")
    old.write_text("left")
    os.utime(old, (time.time() - 7200,) * 2)
    (folder.parent / "ff_g9").symlink_to(outside)
    (tmp_path / f"model_{'0' * 12}_r0").symlink_to(outside)
    assert pruned(tmp_path, namespace="model") == (BLOCKS, BLOCKS * BLOCK)
    assert {path.name for path in folder.iterdir()} == {"notes.bin", f"{'0' * 64}.bin", young.name}
    assert (outside / block.name).read_bytes() == b"not yours"


def test_the_command_looks_at_it_and_prunes_it(tmp_path, tier):
    """`kvtier store` by its words: inspect and prune take vLLM's root, verify says why it does not."""
    made = tier("org/model")
    data = made.fill()
    assert made.store(keys("command"))

    def kvtier(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["store", words[0], str(tmp_path), *words[1:]])
        return done.exit_code, " ".join((done.stdout + done.stderr).split())

    code, said = kvtier("inspect")
    assert code == 0 and "org/model" in said and f"{BLOCKS} chunks" in said and "This tier has no quota" in said
    code, said = kvtier("verify")
    assert code == 2 and "no checksum" in said
    code, said = kvtier("prune", "--keep-gib", "0", "--dry-run")
    assert code == 0 and f"{BLOCKS} chunks" in said
    made.fill()
    assert made.load(keys("command")) and bytes(made.pool.cast("B")) == data
    code, said = kvtier("prune", "--keep-gib", "0", "--yes")
    assert code == 0 and f"Removed {BLOCKS} chunks" in said
    assert made.lookup(keys("command")[0]) is LookupResult.MISS


def test_a_root_may_hold_both_tiers(tmp_path, tier):
    """Each is told and pruned as what it is."""
    made = tier("model")
    made.fill()
    assert made.store(keys("both"))
    with ChunkStore.open(tmp_path, Namespace({"model": "m"}), StoreSettings(quota_bytes=1 << 30)):
        pass
    assert [tree.survey(DAY_S).layout for tree in find_trees(tmp_path)] == ["nvme", "vllm-fs"]
