"""Two tensor-parallel ranks behind vLLM's own doors: served after a restart, and a rank's loss is a recomputation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.support.doors import prompt, serve

# Four engines of two ranks each, on two cores.
pytestmark = pytest.mark.long

TOKENS, WHOLE = 700, 512
RANKS = ("--tensor-parallel-size", "2")
BIND: dict[str, str | None] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def spaces(root: Path) -> list[tuple[dict[str, object], Path]]:
    """The namespaces under a root: what they say of themselves, and where they lie."""
    return [(json.loads(told.read_text())["facts"], told.parent) for told in root.glob("v1/*/namespace.json")]


def chunks(space: Path) -> list[Path]:
    return sorted(space.glob("*/*.kv"), key=lambda path: path.name.split("-")[1])


def test_each_rank_of_the_native_door_has_a_namespace(model: Path, tmp_path: Path) -> None:
    """Both ranks load after a restart; what rank 1 alone has lost is computed again, and stored again."""
    root = tmp_path / "root"
    root.mkdir()
    common = {"quota_gib": 1, "args": RANKS, "env": BIND, "max_model_len": 2048}
    with serve("native", model, root, tmp_path / "first", **common) as first:
        cold, loaded = first.answer(prompt(1, TOKENS))
        assert loaded == 0
        first.settle()
    found = {int(facts["rank"]): space for facts, space in spaces(root) if facts["world_size"] == 2}
    assert sorted(found) == [0, 1] and len(spaces(root)) == 2
    assert len(chunks(found[0])) == len(chunks(found[1])) == WHOLE // 256
    with serve("native", model, root, tmp_path / "second", **common) as second:
        assert second.answer(prompt(1, TOKENS)) == (cold, WHOLE)
        loads = [second.metric("kvtier_chunks_loaded_total", rank=str(rank)) for rank in (0, 1)]
        assert min(loads) >= WHOLE // 256
        for path in chunks(found[1]):
            path.unlink()
        second.forget()
        answer, _ = second.answer(prompt(1, TOKENS))
        assert answer == cold
        assert second.metric("kvtier_chunks_load_failed_total", rank="1", cause="absent") > 0
        second.settle()
        assert second.answer(prompt(1, TOKENS)) == (cold, WHOLE)


def test_a_chunk_behind_vllms_tiering_holds_both_ranks_parts(model: Path, tmp_path: Path) -> None:
    """One namespace, whose facts name both workers; a row comes back whole after a restart, or not at all."""
    root = tmp_path / "root"
    root.mkdir()
    common = {"quota_gib": 1, "args": RANKS, "env": BIND, "max_model_len": 2048}
    with serve("tier", model, root, tmp_path / "first", **common) as first:
        cold, loaded = first.answer(prompt(1, TOKENS))
        assert loaded == 0
        first.settle()
    [(facts, space)] = spaces(root)
    assert facts["workers"][:2] == [2, 2]  # type: ignore[index]
    sizes = [int(str(facts[name])) for name in ("row_bytes", "worker_block_bytes", "blocks_per_chunk")]
    assert sizes[0] >= 2 * sizes[1] * sizes[2]
    with serve("tier", model, root, tmp_path / "second", **common) as second:
        assert second.answer(prompt(1, TOKENS)) == (cold, WHOLE)
        assert second.metric("kvtier_chunks_loaded_total") >= WHOLE // 256
    data = bytearray(chunks(space)[0].read_bytes())
    data[-100] ^= 1
    chunks(space)[0].write_bytes(data)
    with serve("tier", model, root, tmp_path / "third", **common) as third:
        assert third.answer(prompt(1, TOKENS))[0] == cold
        assert third.metric("kvtier_chunks_corrupt_total") == 1
