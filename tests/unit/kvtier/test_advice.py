"""Advice from a start-up log: the numbers and the flags that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.plan import advice
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import UNIT, facts


def test_report_a_stage_one() -> None:
    """The log of report A's box before its stage 1 gives exactly the flags of its stage 1."""
    figures = advice.from_log(UNIT / "logs" / "arc-pro-b70-before.log")
    assert (figures.pool_tokens, figures.max_concurrency, figures.context) == (140530, 1.07, 131072)
    assert (figures.gpu_memory_utilization, figures.max_num_seqs, figures.max_num_batched_tokens) == (0.88, 64, 8192)
    given = {entry.flag: (entry.found, entry.honest) for entry in advice.advise(figures, facts("arc-pro-b70"))}
    assert given == {
        "--gpu-memory-utilization": ("0.88", "0.94"),
        "--max-num-seqs": ("64", "4"),
        "--max-num-batched-tokens": ("8192", "16384"),
    }


def test_right_flags_are_called_right() -> None:
    """Report A's final flags, with its final pool, are called right."""
    figures = advice.EngineFigures(
        source="x",
        pool_tokens=159448,
        context=131072,
        max_concurrency=1.22,
        gpu_memory_utilization=0.94,
        max_num_seqs=4,
        max_num_batched_tokens=16384,
    )
    assert all(entry.right for entry in advice.advise(figures, facts("arc-pro-b70")))


def test_typical_length_decides_seats() -> None:
    """With requests of 15k tokens the pool of report B holds 15 seats, and its step stays small."""
    figures = advice.EngineFigures(source="x", pool_tokens=235074, context=131072)
    given = {entry.flag: entry.honest for entry in advice.advise(figures, facts("rtx-5090"), typical_tokens=15000)}
    assert given["--max-num-seqs"] == "15"
    assert given["--max-num-batched-tokens"] == "8192"


@pytest.mark.parametrize(
    "line",
    [
        "INFO GPU KV cache size: 235,074 tokens, Maximum concurrency for 65,536 tokens per request: 3.59x",
        "INFO GPU KV cache size: 235,074 tokens\nINFO Maximum concurrency for 65,536 tokens per request: 3.59x",
    ],
)
def test_one_and_two_line_forms(line: str) -> None:
    """The line of 0.28 and later and the two lines before it read alike, and the last start in a log counts."""
    figures = advice.from_log_text("INFO CPU KV cache size: 1 tokens\n" + line, "x")
    assert (figures.pool_tokens, figures.context, figures.max_concurrency) == (235074, 65536, 3.59)


def test_log_without_a_pool_is_an_error(tmp_path: Path) -> None:
    """A file that is no start-up log is one clear error."""
    (tmp_path / "log").write_text("hello")
    with pytest.raises(ConfigError, match="--log"):
        advice.from_log(tmp_path / "log")


def test_remarks_say_what_is_bad() -> None:
    """Preemptions and a pool below one context are named."""
    said = " ".join(
        advice.remarks(
            advice.EngineFigures(
                source="x",
                pool_tokens=100000,
                context=131072,
                max_concurrency=0.76,
                preemptions=479,
                waiting_for_capacity=3,
            )
        )
    )
    assert "one full context does not fit" in said
    assert "479 preemptions" in said
    assert "capacity" in said
