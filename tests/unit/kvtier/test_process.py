import os
import signal
import subprocess
import sys
import time

import pytest

from kvtier.process import KeptProcess
from tests.processes import nothing_left

# A command that starts a child which leaves the session and ignores every polite signal, and says when it is there.
STUBBORN_TREE = """
import subprocess, sys, time
child = "import signal, time\\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\\nprint('up', flush=True)\\ntime.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""


def start(tmp_path, code, grace_s=1.0):
    return KeptProcess([sys.executable, "-c", code], os.environ, tmp_path / "log", grace_s=grace_s)


def wait_for_log(log, text, within_s=20.0):
    end = time.monotonic() + within_s
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < end, f"{text!r} not in the log within {within_s} s"
        time.sleep(0.02)


def test_stop_ends_a_child_that_left_the_session_and_ignores_signals(tmp_path):
    """After stop nothing of the command is left, however it tries."""
    with nothing_left(within_s=0):
        process = start(tmp_path, STUBBORN_TREE)
        wait_for_log(process.log, "up")
        assert len(process.processes()) == 2
        process.stop()
        assert process.processes() == []


def test_kill_ends_everything_at_once(tmp_path):
    """kill is a crash: no grace, no process left, an exit status that says SIGKILL."""
    with nothing_left(within_s=0):
        process = start(tmp_path, STUBBORN_TREE, grace_s=600)
        wait_for_log(process.log, "up")
        process.kill()
        assert process.returncode() == 128 + signal.SIGKILL


def test_a_command_may_finish_within_its_grace(tmp_path):
    """SIGTERM comes first, and a command that ends by itself is not killed."""
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(600)"
    )
    process = start(tmp_path, code, grace_s=30)
    wait_for_log(process.log, "up")
    assert process.stop() == 7


def test_the_commands_own_exit_status_is_passed_on(tmp_path):
    """Without a stop the status is the command's, and its output is in the log."""
    process = start(tmp_path, "print('said'); raise SystemExit(3)")
    assert process.wait(30) == 3
    assert "said" in process.log_tail()
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_an_owner_that_dies(tmp_path, number):
    """However the owner ends, also by SIGKILL, the keeper ends the command."""
    owner = (
        "import os, sys, time\nfrom pathlib import Path\nfrom kvtier.process import KeptProcess\n"
        f"KeptProcess([sys.executable, '-c', {STUBBORN_TREE!r}], os.environ, Path(sys.argv[1]), grace_s=1.0)\n"
        "time.sleep(600)\n"
    )
    with nothing_left():
        process = subprocess.Popen([sys.executable, "-c", owner, str(tmp_path / "log")], stderr=subprocess.DEVNULL)
        wait_for_log(tmp_path / "log", "up")
        process.send_signal(number)
        process.wait(30)


def test_nothing_outlives_a_keeper_that_is_killed(tmp_path):
    """Somebody who kills the keeper itself ends the command with it; stop sweeps what is left of the session."""
    with nothing_left():
        process = start(tmp_path, "print('up', flush=True)\nimport time\ntime.sleep(600)")
        wait_for_log(process.log, "up")
        os.kill(process.session, signal.SIGKILL)
        process.stop()
        assert process.processes() == []


def test_io_counts_what_a_child_wrote_also_after_its_end(tmp_path):
    """The bytes are the kernel's for the whole tree, and ended children are in their parents' counts."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = \"import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(bytes(8 << 20)); os.fsync(f.fileno())\"\n"
        f"subprocess.run([sys.executable, '-c', child, {str(tmp_path / 'data')!r}], check=True)\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    with start(tmp_path, code) as process:
        wait_for_log(process.log, "up")
        written = process.settled_io().write_bytes
    assert 8 << 20 <= written < 9 << 20
