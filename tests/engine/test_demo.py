import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes import children_of_this_process, nothing_left

PROJECT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def temporary():
    """The engine's TMPDIR. Its name is short: sockets lie in it, whose paths end after 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start_demo(temporary):
    """Start `kvtier demo` as a shell would; whatever a failed test leaves is ended."""
    started = []

    def start(*arguments, **env):
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.cli", "demo", *arguments],
            env=os.environ | {"TMPDIR": str(temporary)} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process, text, within_s):
    """Everything the demo printed up to `text`; fails where it ends or takes too long."""
    said, end = b"", time.monotonic() + within_s
    while text.encode() not in said:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{text!r} was not printed within {within_s} s: {said.decode()}"
        more = os.read(process.stdout.fileno(), 4096)
        assert more, f"ended before it printed {text!r}: {said.decode()}"
        said += more
    return said.decode()


def wait_for_processes(demo, count, before, within_s):
    end = time.monotonic() + within_s
    while len(children_of_this_process() - before) < count:
        assert demo.poll() is None, f"the demo ended by itself: {demo.stdout.read().decode()}"
        assert time.monotonic() < end, f"fewer than {count} processes after {within_s} s"
        time.sleep(0.1)


def test_the_demo_shows_a_prompt_surviving_a_restart(start_demo, tmp_path):
    """The whole of `make demo` on a tiny model: exit 0, the documented JSON, no CPU pool; a busy port is no problem."""
    with nothing_left(), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        demo = start_demo("--model", "random", "--port", port, "--json", str(tmp_path / "result.json"))
        said, _ = demo.communicate(timeout=500)
        assert demo.returncode == 0, said.decode()
    result = json.loads((tmp_path / "result.json").read_text())
    cold, repeat, restart = result["steps"]
    assert (cold["name"], repeat["name"], restart["name"]) == ("cold", "repeat", "restart")
    assert cold["tokens_computed"] == cold["prompt_tokens"] > 4500
    assert repeat["tokens_computed"] < 256 and repeat["tokens_from_nvme"] == 0
    assert restart["tokens_from_nvme"] >= 0.95 * restart["prompt_tokens"]
    assert restart["tokens_from_nvme"] + restart["tokens_computed"] == restart["prompt_tokens"]
    assert cold["text"] == repeat["text"] == restart["text"] != ""
    assert restart["ttft_s"] < cold["ttft_s"]
    assert result["lmcache_cpu_pool_bytes"] == result["chunks_dropped"] == 0
    assert 0 < result["staging_bytes"] <= 256 << 20
    # 2 KiB of KV a token went to the disk and came back, by the kernel's count.
    assert result["nvme_bytes_written"] >= restart["tokens_from_nvme"] * 2048
    assert result["nvme_bytes_read"] >= restart["tokens_from_nvme"] * 2048


@pytest.mark.long
@pytest.mark.parametrize(
    ("door", "model"),
    [
        *(("native", "hybrid"), ("native", "random"), ("tier", "hybrid"), ("tier", "random"), ("mp", "random")),
        *(("plugin", None), ("native", None), ("tier", None), ("mp", None)),
    ],
)
def test_the_demo_shows_it_through_every_door(start_demo, tmp_path, door, model):
    """A prompt survives a restart through each door that can serve the model, a hybrid one too, and SmolLM2, the
    default; the same JSON."""
    with nothing_left():
        chosen = ("--model", model) if model else ()
        demo = start_demo(*chosen, "--door", door, "--json", str(tmp_path / "result.json"))
        said, _ = demo.communicate(timeout=560)
        assert demo.returncode == 0, said.decode()
    result = json.loads((tmp_path / "result.json").read_text())
    cold, repeat, restart = result["steps"]
    assert (cold["tokens_from_nvme"], repeat["tokens_from_nvme"]) == (0, 0)
    assert restart["tokens_from_nvme"] >= 0.95 * restart["prompt_tokens"] > 4500
    assert cold["text"] == repeat["text"] == restart["text"] != ""
    assert result["nvme_bytes_read"] > 0 and result["nvme_bytes_written"] > 0
    # The doors through vLLM's tiering and LMCache's server pass through host memory, and the JSON does not hide it.
    assert result["lmcache_cpu_pool_bytes"] == (0 if door in ("plugin", "native") else 1 << 30)


def test_a_door_that_cannot_serve_a_model_names_the_one_that_can(start_demo, tmp_path):
    """Before anything is started."""
    (tmp_path / "config.json").write_text((PROJECT / "tests/unit/models/qwen3_5-hybrid/config.json").read_text())
    demo = start_demo("--model", str(tmp_path))
    said, _ = demo.communicate(timeout=120)
    assert demo.returncode == 2 and "--door native" in " ".join(said.decode().split())


# Of the test run, once vLLM's engine core is there: demo, keeper, server, multiprocessing's tracker, core.
WITH_ENGINE_CORE = 5
# The moments at which a person loses patience: what has to be printed, and how many processes there are by then.
MOMENTS = {
    "while the engine starts": ("starting vLLM", WITH_ENGINE_CORE),
    "while the prompt is prefilled": ("cold:", WITH_ENGINE_CORE + 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_no_process_and_no_folder(start_demo, temporary, moment):
    """SIGINT to the demo alone ends everything it had started before it exits with 130."""
    line, processes = MOMENTS[moment]
    before = children_of_this_process()
    with nothing_left(within_s=0):
        demo = start_demo("--model", "random")
        read_until(demo, line, within_s=240)
        wait_for_processes(demo, processes, before, within_s=300)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
    assert list(temporary.iterdir()) == []


def test_two_impatient_ctrl_c_leave_nothing_either(start_demo):
    """The second one comes while the first is being obeyed."""
    before = children_of_this_process()
    with nothing_left(within_s=5):
        demo = start_demo("--model", "random")
        read_until(demo, "starting vLLM", within_s=120)
        wait_for_processes(demo, 3, before, within_s=120)
        demo.send_signal(signal.SIGINT)
        time.sleep(0.1)  # Any instant will do: it must hold at each.
        demo.send_signal(signal.SIGINT)
        demo.wait(60)


def test_nothing_outlives_a_demo_that_is_killed(start_demo):
    """SIGKILL gives the demo no chance to clean up; its engine ends all the same."""
    before = children_of_this_process()
    with nothing_left(within_s=30):
        demo = start_demo("--model", "random")
        read_until(demo, "starting vLLM", within_s=120)
        wait_for_processes(demo, WITH_ENGINE_CORE, before, within_s=300)
        demo.kill()
        demo.wait(60)


def test_ctrl_c_during_the_conversion_leaves_no_half_model(start_demo, tmp_path):
    """An interrupted conversion leaves no folder that the next run would serve."""
    before = children_of_this_process()
    with nothing_left(within_s=0):
        demo = start_demo("--model", "random", KVTIER_CACHE_DIR=str(tmp_path / "cache"))
        read_until(demo, "writing a tiny random Llama", within_s=60)
        wait_for_processes(demo, 3, before, within_s=60)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_an_engine_that_cannot_start_says_why(start_demo, tmp_path):
    """The reason is in the output, and the exit status is 2."""
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "llama"}))
    with nothing_left():
        demo = start_demo("--model", str(model))
        said, _ = demo.communicate(timeout=300)
    assert demo.returncode == 2
    assert "vLLM ended during start" in said.decode() and "NoSuchModel" in said.decode()
