"""The decision log: JSON lines, written behind the requests' backs, rotated by size, shared by workers."""

from __future__ import annotations

import asyncio
import fcntl
from collections import deque
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

MAX_WAITING = 10_000
"""Lines kept for a disk that does not follow; what comes on top is dropped and counted."""

FLUSH_S = 0.2


class DecisionLog:
    """`put` never waits. Several processes may write to one path: lines are appended whole, and the one that finds the
    file over its size rotates it under a lock while the others go on with the file they have open."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path, self.max_bytes, self.files = path, max_bytes, files
        self.dropped = 0
        self._lines: deque[bytes] = deque()
        self._encoder = msgspec.json.Encoder()

    def put(self, **fields: Any) -> None:
        if len(self._lines) >= MAX_WAITING:
            self.dropped += 1
            return
        self._lines.append(self._encoder.encode(fields) + b"\n")

    async def run(self) -> None:
        """Writes for ever, until cancelled; a disk error drops the lines at hand and is tried again."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except OSError:
                self.dropped += 1

    async def flush(self) -> None:
        """Writes every line put so far, in one append a batch."""
        while self._lines:
            batch = b"".join(self._lines.popleft() for _ in range(min(len(self._lines), 256)))
            async with aiofiles.open(self.path, "ab") as out:
                await out.write(batch)
            if await asyncio.to_thread(self._size) > self.max_bytes:
                await asyncio.to_thread(self._rotate)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def _rotate(self) -> None:
        with Path(f"{self.path}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            if self._size() <= self.max_bytes:
                return
            for number in range(self.files - 1, 0, -1):
                older = Path(f"{self.path}.{number}")
                newer = self.path if number == 1 else Path(f"{self.path}.{number - 1}")
                if newer.exists():
                    newer.replace(older)
            if self.files == 1:
                self.path.unlink(missing_ok=True)
