"""Did the environment reach the engine's processes on this host? Read from /proc, because nothing else can know."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from kvtier.doctor.checks import Check, failed, passed
from lmcache_nvme_backend.errors import ConfigError


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
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if _is_engine(words):
            found[int(process.name)] = " ".join(words)[:60].strip()
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
    wrong = [
        f"{key} is {has.get(key, 'not set')}, not {value}" for key, value in wanted.items() if has.get(key) != value
    ]
    if wrong:
        return failed(
            name,
            f"{command}: {'; '.join(wrong)}{source}",
            "set it where this host's engine is started, and start it again",
        )
    return passed(name, f"{command}: has {', '.join(wanted)}{source}")


def _environment(pid: int, proc: Path) -> tuple[dict[str, str], int]:
    """A process's environment and the process that told it.

    A process that gives itself a title ("VLLM::Worker") writes it over its own environment in /proc; its parent's is
    what it was given.
    """
    while True:
        raw = (proc / str(pid) / "environ").read_bytes()
        has = dict(entry.split("=", 1) for entry in raw.decode(errors="replace").split("\0") if "=" in entry)
        parent = _parent(pid, proc)
        titled = (proc / str(pid) / "cmdline").read_bytes().startswith(b"VLLM::")
        if not titled or not _could_have_started_it(parent, proc):
            return has, pid
        pid = parent


def _could_have_started_it(pid: int, proc: Path) -> bool:
    """A Python or vLLM process, not the init that orphans fall to (in a container process 1 may be the engine
    itself)."""
    try:
        command = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"python" in command or b"vllm" in command.lower()


def _parent(pid: int, proc: Path) -> int:
    """Field 4 of /proc/PID/stat, counted from behind the name, which may hold anything."""
    return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _is_engine(words: list[str]) -> bool:
    """A title that vLLM gives its processes, its module under Python, or its command."""
    if words[0].startswith("VLLM::"):
        return True
    if any(Path(word).name == "vllm" for word in words[:2]):
        return True
    return any(flag == "-m" and module.startswith("vllm.") for flag, module in pairwise(words[:5]))
