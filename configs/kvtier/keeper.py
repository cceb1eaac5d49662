"""Run one command and let nothing of it outlive the process that asked for it.

Started as `python -I keeper.py GRACE_S COMMAND...` in a session of its own, with a pipe on standard input. The end of
that pipe is the only thing that has to be said: it comes when the owner asks for a stop, and also when the owner is
killed, whatever it was doing. The command then gets SIGTERM and GRACE_S seconds, and what is left of its session and
of its orphans gets SIGKILL. The exit status is the command's (128 + n for a signal n).

Nothing but the standard library is imported: this process lives as long as the engine does.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# How often the command's end is looked for while the pipe is silent.
_POLL_S = 0.1


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # Not this C library: the session's sweep below remains.


def _stat_fields(process: Path) -> list[str]:
    """State, parent and session stand at 0, 1 and 3; the name before them may hold spaces and brackets."""
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(session: int, keeper: int) -> list[int]:
    """Every live process of the session, and what left it but descends from the keeper; without the keeper."""
    parents: dict[int, int] = {}
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent, _, sid = _stat_fields(entry)[:4]
        except (OSError, ValueError):
            continue  # It ended while we looked.
        if state in "ZX":
            continue
        pid = int(entry.name)
        parents[pid] = int(parent)
        if int(sid) == session:
            found.add(pid)
    for pid in parents:
        above = parents[pid]
        while above > 1 and above != keeper:
            above = parents.get(above, 0)
        if above == keeper:
            found.add(pid)
    found.discard(keeper)
    return sorted(found)


def kill_all(session: int, keeper: int, within_s: float = 5.0) -> list[int]:
    """SIGKILL until nothing is left or the bound is over (a process in the kernel cannot be killed); what is left."""
    end = time.monotonic() + within_s
    while left := descendants(session, keeper):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return left


def _reap_orphans(but: int) -> None:
    """Collect orphans that became ours, so that they do not stay as zombies; the command itself is Popen's."""
    try:
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and info.si_pid != but:
            os.waitpid(info.si_pid, 0)
    except ChildProcessError:
        pass


def main(argv: list[str]) -> int:
    grace_s, command = float(argv[1]), argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The pipe decides, not a key pressed in the owner's terminal.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    owner = 0
    while child.poll() is None:
        _reap_orphans(but=child.pid)
        if select.select([owner], [], [], _POLL_S)[0] and not os.read(owner, 1):
            child.terminate()
            try:
                child.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
            break
    kill_all(os.getsid(0), os.getpid())
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
