"""What a user can set and what a user can see is in the README, and what can be set is in the example."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lmcache_nvme_backend.metrics import METRICS
from lmcache_nvme_backend.settings import PREFIX, NvmeSettings

PROJECT = Path(__file__).parents[3]
README = (PROJECT / "README.md").read_text("utf-8")
EXAMPLE = (PROJECT / "configs/examples/lmcache-nvme.yaml").read_text("utf-8")


@pytest.mark.parametrize("name", [PREFIX + field.name for field in msgspec.structs.fields(NvmeSettings)])
def test_every_setting_is_documented(name):
    """A row of the table, and a word in the example."""
    assert f"| `{name}` |" in README
    assert name in EXAMPLE


@pytest.mark.parametrize("name", [metric.name for metric in METRICS])
def test_every_metric_is_documented(name):
    """By its name; those of chunks share its head."""
    short = name.removeprefix("kvtier_chunks")
    assert f"`{name}" in README or f"`{short}" in README
