"""Keys and the hash seed: what survives a restart, what does not, and what is said about it."""

from __future__ import annotations

import json

from .conftest import start_together, text

PROMPT = text(500, seed=3)
BUILTIN = {"pre_caching_hash_algorithm": "builtin"}


def test_a_random_seed_is_warned_about_and_finds_nothing(start_engine, tmp_path):
    """builtin without PYTHONHASHSEED: one warning with the variable that fixes it, and no hit in another process.

    A fixed seed is a namespace of its own.
    """

    def start(seed):
        return lambda: start_engine(tmp_path, env={"PYTHONHASHSEED": seed}, top=BUILTIN)

    with start_together([start(None), start("1")]) as (random, fixed):
        cold = random.ask(PROMPT)
        random.wait_stored()
        warnings = [line for line in random.log().splitlines() if "PYTHONHASHSEED is not set and" in line]
        assert len(warnings) == 1 and "Set PYTHONHASHSEED=0" in warnings[0]
        answer, tokens = fixed.from_tier(PROMPT)
        assert answer.text == cold.text
        assert tokens == 0
        assert "PYTHONHASHSEED is not set and" not in fixed.log()
    told = [json.loads(path.read_text())["facts"] for path in tmp_path.glob("v1/*/namespace.json")]
    assert len({facts["none_hash"] for facts in told}) == 2
