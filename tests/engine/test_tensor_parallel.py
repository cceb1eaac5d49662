"""Two ranks: each has its own namespace, and a rank that lost its chunks is a recomputation, not a wrong answer."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import text


def test_each_rank_keeps_its_own_chunks_and_a_lost_one_is_recomputed(start_engine, tmp_path):
    """Rank 0 alone answers lookups; rank 1's chunks are deleted; the text is the same and the request completes."""
    prompt = text(300, seed=4)
    with start_engine(
        tmp_path,
        args=("--tensor-parallel-size", "2"),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        top={"lookup_server_worker_ids": [0]},
        spec={"max_model_len": 2048},
        staging_mib=64,
    ) as engine:
        cold = engine.ask(prompt)
        engine.wait_stored()
        ranks: dict[int, Path] = {}
        for told in tmp_path.glob("v1/*/namespace.json"):
            facts = json.loads(told.read_text())["facts"]
            ranks[facts["rank"]] = told.parent
            assert facts["tensor_parallel"] == 2
        assert sorted(ranks) == [0, 1]
        counts = [len(list(ranks[rank].glob("*/*.kv"))) for rank in (0, 1)]
        assert counts[0] == counts[1] >= 2

        engine.forget()
        answer, tokens = engine.from_tier(prompt)
        assert answer.text == cold.text and tokens > 0
        loaded = [engine.metric("kvtier_chunks_loaded_total", rank=str(rank)) for rank in (0, 1)]
        assert min(loaded) >= 2

        engine.forget()
        for path in list(ranks[1].glob("*/*.kv")):
            path.unlink()
        computed = engine.tokens("local_compute")
        answer = engine.ask(prompt)
        assert answer.text == cold.text
        again = [engine.metric("kvtier_chunks_loaded_total", rank=str(rank)) for rank in (0, 1)]
        assert again[0] > loaded[0] and again[1] == loaded[1]
        assert engine.tokens("local_compute") > computed
