"""Four engines' worth of processes with one cache; `make faults` kills a hundred of them."""

from __future__ import annotations

from tests.faults.neighbours import POINTS, run


def test_what_any_process_stored_every_other_one_serves_while_some_are_killed(root):
    """Killed in a put, in an eviction or anywhere: the others go on, each finds all that lies there without being told,
    never with wrong bytes, within the quota, and no lock, session or temporary is left."""
    total = run(root, kills=len(POINTS), seed=6, codec="none")
    assert total["kills"] == len(POINTS) and total["found"] > 100
    assert [total[name] for name in ("wrong", "over_quota", "corrupt")] == [0, 0, 0]
