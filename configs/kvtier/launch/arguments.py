"""The plan's arguments and the user's: the user's win, and every conflict is said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
}
_EXCLUDING = {
    "--kv-offloading-size": ("--kv-transfer-config",),
    "--kv-transfer-config": ("--kv-offloading-size", "--kv-offloading-backend"),
    "--kv-cache-memory-bytes": ("--gpu-memory-utilization",),
    "--gpu-memory-utilization": ("--kv-cache-memory-bytes",),
}
"""A flag of the user's that makes flags of the plan void or wrong: vLLM's size flag overwrites the connector, and a
fixed pool overrides the share of the device's memory."""
_RAM_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_DEFEATING = {
    "--no-enable-prefix-caching": "without prefix caching no tier serves anything",
    "--disable-hybrid-kv-cache-manager": "a hybrid model does not start so",
}


class Merged(msgspec.Struct, frozen=True):
    """The arguments to start with, and what was in conflict."""

    args: list[str]
    conflicts: list[str]


def merge(planned: Sequence[str], users: Sequence[str]) -> Merged:
    """The plan's arguments less those that the user replaced, then the user's."""
    ours, theirs = split(planned), split(users)
    given = {name: value for name, value in theirs}
    conflicts, kept = [], []
    for name, value in ours:
        if _base(name) in {_base(other) for other in given}:
            other = next(key for key in given if _base(key) == _base(name))
            if given[other] != value or other != name:
                conflicts.append(f"{_words(name, value)} of the plan gives way to your {_words(other, given[other])}")
            continue
        voider = next((other for other in given if name in _EXCLUDING.get(other, ())), None)
        if voider:
            conflicts.append(f"{_words(name, value)} of the plan is left out: your {voider} excludes it")
            continue
        kept.append((name, value))
    conflicts += [f"your {name}: {why}" for name, why in _DEFEATING.items() if name in given]
    args = [word for name, value in kept for word in ((name,) if value is None else (name, *value))]
    return Merged(args=args + list(users), conflicts=conflicts)


def transfer_config(words: Sequence[str]) -> dict[str, Any] | None:
    """The connector's configuration in a command line, in every spelling; None where there is none.

    Raises:
        ValueError: it is not a JSON object.
    """
    found: dict[str, Any] | None = None
    for name, values in split(words):
        flag, _, key = name.partition(".")
        if flag != "--kv-transfer-config":
            continue
        found = found or {}
        text = " ".join(values or ())
        if key:
            inner, (*above, last) = found, key.replace("-", "_").split(".")
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = text
            continue
        whole = json.loads(text)
        if not isinstance(whole, dict):
            raise ValueError("not a JSON object")
        found |= whole
    return found


def ram_tier(words: Sequence[str]) -> str | None:
    """The argument that puts a tier in host RAM; None where none does."""
    if any(name == "--kv-offloading-size" for name, _ in split(words)):
        return "--kv-offloading-size"
    try:
        config = transfer_config(words)
    except (ValueError, AttributeError, TypeError):
        return None  # vLLM says what is wrong with it
    named = next((each for each in _connectors(config) if each.get("kv_connector") in _RAM_CONNECTORS), None)
    if named is None:
        return None
    extra = named.get("kv_connector_extra_config")
    on_disk = isinstance(extra, dict) and extra.get("kv_offload_backend") == "disk"
    return None if on_disk else f"{named['kv_connector']} in --kv-transfer-config"


def _connectors(value: Any) -> Iterator[dict[str, Any]]:
    """Every connector of a configuration, those inside a MultiConnector too."""
    if isinstance(value, dict):
        if "kv_connector" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _connectors(entry)


def split(words: Sequence[str]) -> list[tuple[str, tuple[str, ...] | None]]:
    """Flags with their values; names in their long form with dashes. Values of a list flag stay together."""
    found: list[tuple[str, tuple[str, ...] | None]] = []
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            name = _ALIASES.get(name, name)
            if name.startswith("--"):
                name = "--" + name[2:].replace("_", "-")
            found.append((name, (value,) if equals else None))
        elif found:
            name, values = found[-1]
            found[-1] = (name, (*(values or ()), word))
    return found


def _base(name: str) -> str:
    """`--no-x` speaks of the same thing as `--x`, and `--x.key` of a part of it."""
    plain = name.partition(".")[0]
    return "--" + plain.removeprefix("--no-") if plain.startswith("--no-") else plain


def _words(name: str, value: tuple[str, ...] | None) -> str:
    return name if value is None else f"{name} {' '.join(value)}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
