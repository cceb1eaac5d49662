"""A command in a session of its own that never outlives its owner."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from kvtier import keeper

# A stop may take the grace, then the keeper's own bound for what has to be killed.
_KEEPER_SLACK_S = 8.0


class IoCounters(msgspec.Struct, frozen=True):
    """Bytes that went to and came from the block layer, as the kernel counts them for a process tree."""

    read_bytes: int = 0
    write_bytes: int = 0

    def __sub__(self, other: IoCounters) -> IoCounters:
        return IoCounters(self.read_bytes - other.read_bytes, self.write_bytes - other.write_bytes)

    def __add__(self, other: IoCounters) -> IoCounters:
        return IoCounters(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)


class KeptProcess:
    """Start a command, follow its log in a file, stop it; nothing of it is left afterwards, however the owner ends.

    The command's standard output and error go to `log`. Use it as a context manager, or call `stop` or `kill`; if
    the owner dies before it can, the keeper (see keeper.py) does it.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float = 20.0) -> None:
        self.command, self.log, self._grace_s = list(command), log, grace_s
        with log.open("ab") as out:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """The session's id, which is also the keeper's process id."""
        return self._keeper.pid

    def processes(self) -> list[int]:
        """The live processes of the command: itself and everything it started."""
        return keeper.descendants(self.session, self.session)

    def returncode(self) -> int | None:
        """The command's exit status, or None while it runs."""
        return self._keeper.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the command's own end. Raises subprocess.TimeoutExpired."""
        return self._keeper.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM to the command, its grace, then SIGKILL to what is left. Returns the exit status."""
        try:
            if self._keeper.stdin:
                self._keeper.stdin.close()
            code = self._keeper.wait(self._grace_s + _KEEPER_SLACK_S)
        except BaseException:  # A second Ctrl-C too must find nothing running.
            self.kill()
            raise
        keeper.kill_all(self.session, self.session)  # Only where somebody killed the keeper itself.
        return code

    def kill(self) -> None:
        """SIGKILL to every process of the command at once, as a crash or the kernel's OOM killer would."""
        keeper.kill_all(self.session, self.session)
        if self._keeper.stdin:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(_KEEPER_SLACK_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 64 * 1024))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def io(self) -> IoCounters:
        """The sum of /proc/<pid>/io over the command's processes; children that ended are in their parents' counts."""
        total = IoCounters()
        for pid in self.processes():
            try:
                text = Path(f"/proc/{pid}/io").read_text()
            except OSError:
                continue  # It ended, or this kernel has no I/O accounting.
            fields = dict(line.split(": ") for line in text.splitlines())
            total += IoCounters(int(fields["read_bytes"]), int(fields["write_bytes"]))
        return total

    def settled_io(self, quiet_s: float = 0.5, at_most_s: float = 15.0) -> IoCounters:
        """`io` once nothing has been written for `quiet_s`: stores are written behind the answer."""
        end = time.monotonic() + at_most_s
        last, since = self.io(), time.monotonic()
        while time.monotonic() - since < quiet_s and time.monotonic() < end:
            time.sleep(0.05)
            now = self.io()
            if now != last:
                last, since = now, time.monotonic()
        return last

    def __enter__(self) -> KeptProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
