"""A real engine whose cache directory is damaged, filled, made read-only and back. `make soak` runs it longer."""

from __future__ import annotations

import pytest

from tests.soak.run import soak


@pytest.mark.timeout(600)
def test_every_answer_is_right_while_the_directory_is_damaged(model, tmp_path):
    """No request fails, every answer and every chunk left is that of an engine that computes all of it itself; no
    staging slot, descriptor or thread is left behind."""
    report = soak(tmp_path, model, seconds=45)
    assert report.failures == []
    assert report.answers.wrong == [] and report.answers.undecided <= report.answers.compared // 20
    assert report.answers.compared > 10
    assert report.chunks.wrong == 0 and report.chunks.compared > 3
    # The tier did take part, and the faults did reach it.
    assert report.tokens_from_tier > 1000
    assert report.chunks_corrupt > 0
    assert not report.mounted or {"full disk", "read-only"} <= report.faults.keys()
    assert report.leaks() == []
