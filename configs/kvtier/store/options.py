"""The options of ``kvtier store``, checked once at the edge."""

from __future__ import annotations

import math
import re
from pathlib import Path

from kvtier.units import GIB
from lmcache_nvme_backend.errors import ConfigError

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.ASCII)
# A hundred years: what is longer is a slip of the hand.
_LONGEST_S = 100 * 365 * 86_400


def duration(setting: str, text: str | None) -> float | None:
    """Seconds of a text such as ``7d``, ``12h`` or ``90min``. Raises `ConfigError`."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip().lower())
    unit = _SECONDS.get(found[2]) if found else None
    if found is None or unit is None or float(found[1]) * unit > _LONGEST_S:
        raise ConfigError(
            setting, repr(text), f"a number and a unit: {', '.join(_SECONDS)}", "Such as 7d, 12h or 90min."
        )
    return float(found[1]) * unit


def gibibytes(setting: str, text: str | None) -> int | None:
    """Bytes of a number of GiB, 0 included. Raises `ConfigError`."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**33:
        raise ConfigError(setting, repr(text), "a number of GiB, 0 or more", "Such as 40 or 0.5, without a unit.")
    return int(value * GIB)


def json_target(text: str | None) -> str | None:
    """``-``, or a file in a directory that exists: known before the work begins. Raises `ConfigError`."""
    if text is None or text == "-":
        return text
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("--json", repr(text), "- or a file in a directory that exists", "Make it, or name another.")
    return text


def namespace(text: str | None) -> str | None:
    """The head of a namespace's name. Raises `ConfigError` where it would name all of them."""
    if text is not None and not text.strip():
        raise ConfigError(
            "--namespace", repr(text), "the head of a namespace's name", "`kvtier store inspect` lists them."
        )
    return text
