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
        if any(mark in command for mark in _MARKS) and not _ours(command):
            found[int(process.name)] = command[:60]
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
        has, told_by = _environment(pid, proc)
    except OSError as error:
        return failed(name, f"{command}: its environment cannot be read ({error.strerror})", "run as the engine's user")
    source = "" if told_by == pid else f" (told by its parent {told_by}, whose environment it was given)"
    wrong = [f"{key} is {has.get(key, 'not set')}, not {value}" for key, value in wanted.items() if has.get(key) != value]
    if wrong:
        return failed(name, f"{command}: {'; '.join(wrong)}{source}", "set it where this host's engine is started, and start it again")
    return passed(name, f"{command}: has {', '.join(wanted)}{source}")


def _environment(pid: int, proc: Path) -> tuple[dict[str, str], int]:
    """A process's environment and the process that told it.

    A process that gives itself a title ("VLLM::Worker") writes it over its own environment in /proc; its parent's is what it was given.
    """
    while True:
        raw = (proc / str(pid) / "environ").read_bytes()
        has = dict(entry.split("=", 1) for entry in raw.decode(errors="replace").split("\0") if "=" in entry)
        parent = _parent(pid, proc)
        titled = (proc / str(pid) / "cmdline").read_bytes().startswith(b"VLLM::")
        if not titled or parent <= 1:
            return has, pid
        pid = parent


def _parent(pid: int, proc: Path) -> int:
    """Field 4 of /proc/PID/stat, counted from behind the name, which may hold anything."""
    return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _ours(command: str) -> bool:
    words = command.split()
    return any(word.startswith("kvtier") or word.endswith("/kvtier") for word in words[:4])
