"""What must hold in every release that this door serves. Each scenario takes an empty folder and returns plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.native.room import Room, chunk_files, damage, prompt

TOKENS = 1000  # of which 992 are whole blocks


def kinds(hybrid: bool) -> dict[str, Any]:
    return {"hybrid": hybrid} if hybrid else {"hybrid": False, "blocks_per_chunk": 2}


def restart(folder: Path, **kind: Any) -> dict[str, Any]:
    """A prompt cold, from the tier once the pool is empty, and from the tier after a restart."""
    room = Room(folder, **kind)
    served = [room.serve("cold", prompt(TOKENS))]
    room.wait_stored()
    room.forget()
    served.append(room.serve("emptied", prompt(TOKENS)))
    room.close()
    room = Room(folder, **kind)
    served.append(room.serve("restarted", prompt(TOKENS)))
    hits = room.manager.hits
    room.close()
    return {"served": served, "hits": hits, "groups": sorted(room.groups), "files": len(chunk_files(folder))}


def damaged(folder: Path, rank: int, separate: bool = False, **kind: Any) -> dict[str, Any]:
    """A chunk in the middle of what a load needs is damaged; the prompt is asked for twice more.

    `rank` tells the groups apart: attention comes first.
    """
    room = Room(folder, separate=separate, **kind)
    room.serve("cold", prompt(TOKENS))
    room.wait_stored()
    groups = len(room.groups)
    files = [f for f in chunk_files(folder) if int(f.name.split("-")[1], 16) % groups == rank]
    damage(files[len(files) // 2])
    room.forget()
    room.serve("asked", prompt(TOKENS))
    room.wait_stored()
    room.forget()
    again = room.serve("again", prompt(TOKENS))
    values = room.side.values()
    free = room.side.ring.free == room.side.ring.slots
    room.close()
    return {
        "loads": [chunks for name, chunks in room.loads if name == "asked"],
        "again": again,
        "again_loads": len([name for name, _ in room.loads if name == "again"]),
        "corrupt": values["kvtier_chunks_corrupt_total"],
        "failed": values["kvtier_chunks_load_failed_total"],
        "slots_came_back": free,
    }


def restart_full(folder: Path) -> dict[str, Any]:
    return restart(folder, **kinds(hybrid=False))


def restart_hybrid(folder: Path) -> dict[str, Any]:
    return restart(folder, **kinds(hybrid=True))


def damaged_attention(folder: Path) -> dict[str, Any]:
    return damaged(folder, 0, **kinds(hybrid=True))


def damaged_state(folder: Path) -> dict[str, Any]:
    return damaged(folder, 2, **kinds(hybrid=True))
