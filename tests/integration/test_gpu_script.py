"""tests/gpu on a machine without a GPU: it skips with one line, and what needs no device works on CPU tensors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lmcache")

import sys

import torch

from tests.gpu import drive
from tests.gpu.drive import Case, Found, PagedKv

ROOT = Path(__file__).resolve().parents[2]


def small(layout: str, dtype: str) -> Case:
    return Case(layout, dtype, layers=2, heads=2, head=16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there: tests/gpu/run.sh runs on it")
def test_without_cuda_it_skips_with_one_line():
    """Exit status 0, and the line says what is missing."""
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 0
    assert done.stdout.startswith("tests/gpu: skipped: torch ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_a_round_trip_of_the_packed_layout_on_the_cpu(tmp_path, dtype):
    """The script's whole flow with this project's CPU connector in place of LMCache's: every layer arrives."""
    found = drive.run_case(small("packed", dtype), tmp_path, "cpu", gib=0.0, staging_mib=8)
    assert drive.failures(found, "cpu") == []
    assert found.load_gbps > 0


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_its_comparison_sees_one_wrong_byte(layout):
    """A target equal to the source passes; one bit elsewhere names the layer."""
    kv = PagedKv(small(layout, "bfloat16"), 4 * drive.CHUNK, "cpu")
    assert kv.arrived() == [0, 1]
    for layer in kv.layers:
        by_block = layer.movedim(1, 0) if layout == "dense" else layer
        by_block[kv._tables[1]] = by_block[kv._tables[0]].clone()
    assert kv.arrived() == []
    changed = kv.layers[1].view(torch.uint8)
    block = int(kv._tables[1][3])
    (changed[1] if layout == "dense" else changed)[block].flatten()[7] ^= 1
    assert kv.arrived() == [1]
    kv.clear_target()
    assert kv.arrived() == [0, 1]


def test_what_is_not_as_it_should_be_is_said():
    """On a device each thing the script shows is demanded."""
    bad = Found("packed fp8", 1.0, 1.0, pinned=False, behind=0, wrong_layers=[3], slots_back=False)
    assert len(drive.failures(bad, "cuda")) == 4
    good = Found("packed fp8", 1.0, 1.0, pinned=True, behind=9, wrong_layers=[], slots_back=True)
    assert drive.failures(good, "cuda") == []
