"""The plan's arguments and the user's: the user's win, and every conflict is said."""

from __future__ import annotations

from collections.abc import Sequence

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
}
"""A flag of the user's that makes flags of the plan void or wrong: vLLM's size flag overwrites the connector."""
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
