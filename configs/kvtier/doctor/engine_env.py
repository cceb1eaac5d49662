"""Did the environment reach the engine's processes on this host? Read from /proc, because nothing else can know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtier.doctor.checks import Check, failed, passed
from lmcache_nvme_backend.errors import ConfigError

_MARKS = ("VLLM::", "vllm.entrypoints", "vllm serve", "bin/vllm")


def expected(pairs: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError("--expect", repr(pair), "NAME=VALUE", "Such as --expect PYTHONHASHSEED=0.")
        found[name] = value
    return found


def engine_processes(proc: Path = Path("/proc")) -> dict[int, str]:
    """vLLM's processes that can be seen, by process id, with the start of their command line."""
    found = {}
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if any(mark in command for mark in _MARKS) and "kvtier" not in command:
            found[int(process.name)] = command[:80]
    return found


def check(wanted: Mapping[str, str], proc: Path = Path("/proc")) -> list[Check]:
    """One check a process: whether it has every variable, at the value that was planned."""
    processes = engine_processes(proc)
    if not processes:
        return [failed("engine-env", "no process of vLLM runs on this host", "start the engine here first")]
    return [_one(pid, command, wanted, proc) for pid, command in sorted(processes.items())]


def _one(pid: int, command: str, wanted: Mapping[str, str], proc: Path) -> Check:
    name = f"engine-env {pid}"
    try:
        raw = (proc / str(pid) / "environ").read_bytes()
    except OSError as error:
        return failed(name, f"{command}: its environment cannot be read ({error.strerror})", "run as the engine's user")
    has = dict(entry.split("=", 1) for entry in raw.decode(errors="replace").split("\0") if "=" in entry)
    wrong = [f"{key} is {has.get(key, 'not set')}, not {value}" for key, value in wanted.items() if has.get(key) != value]
    if wrong:
        return failed(name, f"{command}: {'; '.join(wrong)}", "set it where this host's engine is started, and start it again")
    return passed(name, f"{command}: has {', '.join(wanted)}")
