"""From a plan to what is executed: the LMCache file, the tier's directory, environment and command line."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.facts import Memory
from kvtier.launch.arguments import merge, ram_tier, split
from kvtier.plan.result import Plan
from kvtier.render.formats import Host, as_yaml, host
from lmcache_nvme_backend.errors import ConfigError

_FILE = "LMCACHE_CONFIG_FILE"
_YOURS = {"VLLM_CPU_KVCACHE_SPACE"}
"""Sizes that vLLM takes from the environment alone: a wish like those after `--`."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Ready to run."""

    command: list[str]
    env: dict[str, str]
    """The plan's variables; the rest of the environment is the caller's."""
    conflicts: list[str]


def prepare(
    plan: Plan,
    users: Sequence[str],
    environment: Mapping[str, str],
    rank: int = 0,
    state: Path | None = None,
    *,
    write: bool = True,
) -> Start:
    """Write the LMCache file, make the tier's directory, merge the arguments; without `write`, merge only.

    Raises:
        ConfigError: the directory cannot be made, or the state folder cannot be written.
    """
    part = host(plan, rank)
    merged = merge(part.args, users)
    env, conflicts = dict(part.env), [*merged.conflicts, *_contradictions(plan, users)]
    if part.lmcache is not None:
        text = as_yaml(plan, part)
        file = _file(state or state_folder(environment), text)
        env[_FILE] = str(file)
        if write:
            _write(file, text)
    if part.nvme and write:
        _make(part)
    for name, value in list(env.items()):
        theirs = environment.get(name)
        if theirs is None or theirs == value:
            continue
        if name == "PYTHONHASHSEED" and theirs.isdigit():
            conflicts.append(
                f"{name}={theirs} of your environment is kept: it names other blocks than {name}={value}, and is as "
                "fixed"
            )
            del env[name]
        elif name in _YOURS:
            conflicts.append(f"{name}={theirs} of your environment is kept instead of the plan's {value}")
            del env[name]
        else:
            conflicts.append(f"{name}={theirs} of your environment gives way to {value}")
    return Start(command=[*executable(plan), *merged.args], env=env, conflicts=conflicts)


def executable(plan: Plan) -> list[str]:
    """The plan's command with this interpreter, or the `vllm` beside it."""
    first, *rest = plan.command
    if first == "python":
        return [sys.executable, *rest]
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside) if beside.exists() else shutil.which("vllm") or "vllm", *rest]


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where launch keeps the files it writes: XDG's state folder."""
    given = environment.get("XDG_STATE_HOME")
    base = Path(given) if given else Path(environment.get("HOME", "/")) / ".local" / "state"
    return base / "kvtier"


def _contradictions(plan: Plan, users: Sequence[str]) -> list[str]:
    """What the user asked for after `--` that this box takes amiss; it is passed on all the same."""
    found = []
    if plan.memory == Memory.UNIFIED and (tier := ram_tier(users)):
        found.append(
            f"your {tier} takes host RAM, which on this box's unified memory is taken from the model and its KV pool; "
            "it was asked for and is passed on"
        )
    given = dict(split(users))
    pool = next((tier for tier in plan.tiers if tier.name == "pool"), None)
    length = (given.get("--max-model-len") or ("",))[0]
    resized = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--kv-cache-dtype"} & set(given)
    if pool is not None and not resized and length.isdigit() and int(length) > pool.tokens:
        found.append(
            f"your --max-model-len {length} is more than the {pool.tokens:,} tokens that the plan's pool holds: vLLM "
            "will not start"
        )
    return found


def _file(folder: Path, text: str) -> Path:
    """The LMCache file's path, named by its content, so that two launches never overwrite each other's."""
    return folder / f"lmcache-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            "XDG_STATE_HOME", f"{path.parent} ({error.strerror})", "a writable folder", "Set XDG_STATE_HOME to one."
        ) from error


def _make(part: Host) -> None:
    assert part.nvme is not None
    try:
        Path(part.nvme).mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            "--nvme",
            f"{part.nvme} ({error.strerror})",
            "a directory that can be made and written",
            "Mount the disk, or name another directory.",
        ) from error
