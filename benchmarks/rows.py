"""The rows of a benchmark: what its JSON holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Row(msgspec.Struct, omit_defaults=True):
    """One figure. `size` is in bytes, entries or tokens, as the benchmark's page says; `peer_ratio` is this value over
    the best peer's of the same operation and size."""

    subject: str
    operation: str
    size: int
    value: float
    unit: str
    peer_ratio: float | None = None
    share_of_fio: float | None = None  # of the drive's own line in the same rounds
    rss_growth_mib: float | None = None  # peak above the state before the first byte
    resident_mib: float | None = None  # peak above the state before the subject was opened
    cpu_s_per_gb: float | None = None
    samples: list[float] | None = None  # one a round, in the unit of `value`
    note: str | None = None


def write_json(path: Path, rows: list[Row], machine: dict[str, Any], **more: Any) -> None:
    """`{"rows": […], "machine": {…}}`, and what else a benchmark found."""
    document = {"rows": rows, "machine": machine} | more
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def number(value: float | None, form: str = ".2f") -> str:
    return "—" if value is None else format(value, form)
