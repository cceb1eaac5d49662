"""Run vLLM as a child: every signal is passed on, every line of its log is passed through, its exit code is ours."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def run(command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
    """Start `command`, hand every line of its output to `on_line`, and wait for its end.

    The child has a session of its own, so that a Ctrl-C reaches it once, through us; it gets SIGTERM if we are killed.
    Returns its exit code, 128 + n where signal n ended it. Must be called from the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    process = subprocess.Popen(
        command,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end_session(process.pid)
    return 128 - code if code < 0 else code


def _end_session(session: int) -> None:
    """Workers that outlived the front process hold the device's memory: end what is left of its session's group."""
    try:
        os.killpg(session, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
