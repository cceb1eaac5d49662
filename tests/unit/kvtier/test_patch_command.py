"""`kvtier patch` is the patch tool: its words, its output and its exit codes."""

import json
import subprocess
import sys


def kvtier_patch(*words):
    command = [sys.executable, "-m", "kvtier.cli", "patch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_shows_what_the_catalogue_holds():
    """The words go through as they are."""
    done = kvtier_patch("show", "vllm-52771")
    assert done.returncode == 0 and "vllm-project/vllm#52771" in done.stdout


def test_its_exit_codes_come_through(tmp_path):
    """A container's start script relies on them: 5 where there is no vLLM, 2 for a wrong word."""
    done = kvtier_patch("status", "--site", str(tmp_path), "--json")
    assert done.returncode == 5
    told = json.loads(done.stdout)
    assert "not-installed" in json.dumps(told)
    assert kvtier_patch("no-such-word").returncode == 2
