import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup.py"


def setup(folder, *python_args):
    return subprocess.Popen(
        [sys.executable, *python_args, str(SCRIPT), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_environment_of_someone_else_is_left_alone(tmp_path):
    """A folder that this script did not make is named and not touched."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").touch()
    process = setup(tmp_path / "theirs")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was not made by this script" in said
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["precious"]


def test_an_interrupted_set_up_does_not_look_finished(tmp_path):
    """Ended in the middle there is no stamp, so make runs it again, and what it left is not used."""
    folder = tmp_path / "venv"
    process = setup(folder)
    for line in process.stdout:
        if "creating it" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (folder / ".setup-complete").exists()

    (folder / "left-behind").touch()
    process = setup(folder)
    said = ""
    for line in process.stdout:
        said += line
        if "creating it" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "starting over" in said
    assert not (folder / "left-behind").exists()


def test_the_size_is_said_before_anything_starts(tmp_path):
    """A person on a small disk learns of the 4 GB first."""
    process = setup(tmp_path / "venv")
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "about 4 GB" in first and "GB are free" in first


def test_it_stops_what_it_was_running(tmp_path):
    """No pip goes on in the background after an interrupt."""
    from tests.processes import nothing_left

    with nothing_left():
        process = setup(tmp_path / "venv")
        for line in process.stdout:
            if "creating it" in line:
                break
        time.sleep(0.2)  # Into the command, whichever instant of it.
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
