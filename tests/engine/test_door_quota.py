"""A quota that a run does not fit into, through each door: the answers stay right, and the disk never has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.support.doors import CHUNK, Scales, prompt, serve

# Two engines a door; `make test` has the same behind vLLM's own scheduler (tests/integration).
pytestmark = pytest.mark.long

# 1,500 tokens of the random Llama in float32 are 5 chunks of 1 MiB: nine prompts fit, and half as many again are asked.
QUOTA_GIB, PROMPTS = 0.045, 14
WHOLE = 1500 // CHUNK * CHUNK
ALL: dict[str, Any] = {"quota_gib": QUOTA_GIB, "admission": "all"}


@pytest.mark.parametrize("door", ["native", "tier", "mp"])
def test_a_run_longer_than_the_quota_stays_within_it_and_right(model: Path, tmp_path: Path, door: str) -> None:
    """Cold, repeated, evicted and restarted: the same token ids; some prompts have gone from the disk, the last has
    not; and a new engine on the full root finds that one and goes on within the quota."""
    root = tmp_path / "root"
    root.mkdir()
    with Scales(root, QUOTA_GIB) as scales:
        with serve(door, model, root, tmp_path / "first", **ALL) as first:
            cold = []
            for seed in range(PROMPTS):
                ids, loaded = first.answer(prompt(seed))
                assert loaded == 0
                assert first.answer(prompt(seed)) == (ids, 0)  # from vLLM's own pool
                cold.append(ids)
            first.settle()
            assert first.count("kvtier_chunks_evicted_total") > 10
        with serve(door, model, root, tmp_path / "second", **ALL) as second:
            ids, loaded = second.answer(prompt(PROMPTS - 1))
            assert (ids, loaded) == (cold[-1], WHOLE)
            assert second.count("kvtier_chunks_loaded_total") >= WHOLE // CHUNK
            found = []
            for seed in range(PROMPTS):
                ids, loaded = second.answer(prompt(seed))
                assert ids == cold[seed], f"prompt {seed}"
                found.append(loaded)
            assert min(found) < WHOLE
            assert second.count("kvtier_chunks_evicted_total") > 0
    assert scales.within_quota and scales.peak > 0.8 * QUOTA_GIB * 2**30
