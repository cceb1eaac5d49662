"""Engines' offloading on one root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.integration.tier.world import Make, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Make]:
    """A factory of engines' offloading on one root."""
    made: list[World] = []

    def make(**settings: object) -> World:
        made.append(World(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()
