from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rooms import EngineRoom


@pytest.fixture(scope="module")
def rooms() -> Iterator[Callable[[str], EngineRoom]]:
    """The engine room of a release, started when first asked for. One at a time: each holds a whole torch."""
    pytest.importorskip("torch")
    open_rooms: dict[str, EngineRoom] = {}

    def room(version: str) -> EngineRoom:
        if version not in open_rooms:
            while open_rooms:
                open_rooms.popitem()[1].close()
            open_rooms[version] = EngineRoom(version)
        return open_rooms[version]

    yield room
    for each in open_rooms.values():
        each.close()
