"""Two models' engines that live on one root, behind vLLM's real scheduler: one quota, and the blocks stay right."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.integration.native.room import Room, chunk_files, prompt

QUOTA_GIB = 0.004
TOKENS, WHOLE = 500, 496
PROMPTS = 8  # of the dense model fill the root; of the hybrid one, twice as many do


def test_a_model_that_comes_later_gets_its_part_and_both_go_on(tmp_path: Path) -> None:
    """A dense model has filled the root; a hybrid one comes, takes its half, and finds what it was asked last. Then the
    dense one asks for all of its own again, of which some have gone. Every block is right, and the quota holds."""
    quota = int(QUOTA_GIB * 2**30)
    spaces: list[dict[Path, int]] = []

    def serve(room: Room, name: str, seed: int) -> int:
        served = room.serve(f"{name} {seed}", prompt(TOKENS, seed))
        room.wait_stored()
        room.forget()
        held: dict[Path, int] = {}
        for path in chunk_files(tmp_path):
            held[path.parents[1]] = held.get(path.parents[1], 0) + path.stat().st_size
        assert sum(held.values()) <= quota
        spaces.append(held)
        return served

    dense = Room(tmp_path, blocks_per_chunk=2, quota_gib=QUOTA_GIB, admission="all")
    for seed in range(PROMPTS):
        serve(dense, "dense", seed)
    ((first, full),) = spaces[-1].items()
    assert full > 0.9 * quota
    hybrid = Room(tmp_path, hybrid=True, separate=True, quota_gib=QUOTA_GIB, admission="all")
    for seed in range(100, 100 + 2 * PROMPTS):
        serve(hybrid, "hybrid", seed)
    assert 0.3 * quota < spaces[-1][first] < 0.7 * quota
    assert serve(hybrid, "again", 99 + 2 * PROMPTS) == WHOLE
    found = [serve(dense, "again", seed) for seed in reversed(range(PROMPTS))]
    assert found[0] > 0 and min(found) < WHOLE
    assert serve(dense, "at last", 0) > 0
    for seed in range(100, 100 + 2 * PROMPTS):
        serve(hybrid, "once more", seed)
    assert serve(hybrid, "at last", 99 + 2 * PROMPTS) == WHOLE
    dense.close()
    hybrid.close()
