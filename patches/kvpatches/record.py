"""What this tool remembers beside a file it changed: the original, and which content holds which patches.

It lives in a folder `.kvpatches` next to the file, on the same file system, so that every step is a rename.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpatches.errors import ConfigError

FOLDER = ".kvpatches"
_FORMAT = 1

# (patch id, option or None), in the order in which they were made
Steps = tuple[tuple[str, str | None], ...]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Record:
    """`original` is the digest of the untouched file; `contents` maps the digest of a content to what is in it.

    It is written before the file is replaced, and keeps what it said before: whatever moment a crash picks, the file
    on disk is the original or one of the contents.
    """

    original: str
    contents: Mapping[str, Steps] = field(default_factory=dict)

    def steps(self, data: bytes) -> Steps | None:
        """What `data` holds: nothing for the original, None for a content that this tool did not write."""
        return () if digest(data) == self.original else self.contents.get(digest(data))

    def with_content(self, data: bytes, steps: Sequence[tuple[str, str | None]]) -> Record:
        return Record(self.original, {**self.contents, digest(data): tuple(steps)})

    def encode(self) -> bytes:
        body = {"format": _FORMAT, "original": self.original, "contents": dict(self.contents)}
        return json.dumps(body, indent=1).encode("utf-8") + b"\n"


@dataclass(frozen=True)
class Beside:
    """Paths of what belongs to one patched file."""

    file: Path

    @property
    def folder(self) -> Path:
        return self.file.parent / FOLDER

    @property
    def backup(self) -> Path:
        return self.folder / (self.file.name + ".orig")

    @property
    def record(self) -> Path:
        return self.folder / (self.file.name + ".json")

    @property
    def lock(self) -> Path:
        return self.folder / (self.file.name + ".lock")

    def read_record(self) -> Record | None:
        """The record, or None where there is none that can be read."""
        try:
            raw = json.loads(self.record.read_bytes())
            if raw["format"] != _FORMAT:
                return None
            contents = {d: tuple((str(i), o) for i, o in steps) for d, steps in raw["contents"].items()}
            return Record(str(raw["original"]), contents)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def read_original(self, record: Record) -> bytes:
        """The untouched file. Raises ConfigError where the backup is gone or damaged."""
        try:
            data = self.backup.read_bytes()
        except OSError as err:
            raise ConfigError(str(self.backup), f"no readable backup ({err})", "the original", _REINSTALL) from err
        if digest(data) != record.original:
            raise ConfigError(str(self.backup), "a backup with other content than recorded", "the original", _REINSTALL)
        return data


_REINSTALL = "Nothing was changed. Reinstall vLLM to get its own file back."
