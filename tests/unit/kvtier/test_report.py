import io
import json

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvtier.report import Report, Step, human_bytes, required_tokens, show


def step(name, computed, from_pool=0, from_nvme=0, **changes):
    values = {
        "name": name, "ttft_s": 1.0, "prompt_tokens": computed + from_pool + from_nvme, "tokens_computed": computed,
        "tokens_from_pool": from_pool, "tokens_from_nvme": from_nvme, "bytes_read": 0, "bytes_written": 0,
        "text": "Hannah",
    }  # fmt: skip
    return Step(**(values | changes))


def good_report():
    steps = [step("cold", 5000), step("repeat", 136, from_pool=4864), step("restart", 136, from_nvme=4864)]
    return Report(
        steps=steps, lmcache_cpu_pool_bytes=0, staging_bytes=1 << 28, nvme_bytes_written=7, nvme_bytes_read=8,
        chunks_dropped=0, chunks_corrupt=0,
    )  # fmt: skip


def with_step(report, index, **changes):
    steps = list(report.steps)
    steps[index] = replace(steps[index], **changes)
    return replace(report, steps=steps)


def printed(report):
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    return out.getvalue()


def test_a_good_run_has_no_faults_and_says_so():
    """The verdict of a run that is as it should be."""
    assert good_report().faults() == []
    assert "97% of the prompt survived" in printed(good_report())


@pytest.mark.parametrize(
    ("spoiled", "word"),
    [
        (with_step(good_report(), 2, tokens_from_nvme=4600, tokens_computed=400), "4600 of 5000"),
        (with_step(good_report(), 2, text="Janet"), "Janet"),
        (with_step(good_report(), 1, text="Janet"), "repeat"),
        (with_step(good_report(), 0, tokens_from_nvme=256), "not cold"),
        (replace(good_report(), chunks_dropped=3), "3 chunks were dropped"),
        (replace(good_report(), chunks_corrupt=1), "1 chunks were damaged"),
        (replace(good_report(), lmcache_cpu_pool_bytes=5 << 30), "5.0 GiB"),
    ],
)
def test_every_fault_is_found_and_named(spoiled, word):
    """Each thing that is not as it should be is one sentence, printed with a cross."""
    (fault,) = spoiled.faults()
    assert word in fault
    assert "✗" in printed(spoiled) and "✓" not in printed(spoiled)


def test_the_json_has_exactly_the_documented_shape():
    """Programs read it: these keys, in this nesting, and no others."""
    shape = json.loads(good_report().to_json())
    assert set(shape) == {
        "steps", "lmcache_cpu_pool_bytes", "staging_bytes", "nvme_bytes_written", "nvme_bytes_read", "chunks_dropped",
    }  # fmt: skip
    assert [s["name"] for s in shape["steps"]] == ["cold", "repeat", "restart"]
    for s in shape["steps"]:
        assert set(s) == {"name", "ttft_s", "prompt_tokens", "tokens_computed", "tokens_from_nvme", "text"}


def test_the_table_fits_a_log_of_80_columns():
    """Nothing is cut where the output is not a terminal."""
    report = with_step(good_report(), 0, ttft_s=127.25, bytes_written=123456789)
    text = printed(report)
    assert "127.25 s" in text and "117.7 MiB" in text and "…" not in text


@pytest.mark.parametrize(("prompt", "needed"), [(5000, 4750), (513, 487), (512, 256), (600, 512), (257, 244), (256, 0)])
def test_a_short_prompt_needs_only_its_whole_chunks(prompt, needed):
    """95 % cannot be asked of a prompt whose tail below a chunk is more than the rest."""
    assert required_tokens(prompt) == needed


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 40, "3.0 TiB")])
def test_bytes_are_written_in_binary_units(count, text):
    """As `du -h` has them."""
    assert human_bytes(count) == text
