"""The parts of launch that need no engine: merging arguments, sweeping leaks, following a log, passing signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import yaml

from kvtier.launch import sweep
from kvtier.launch.arguments import merge
from kvtier.launch.follow import Follower
from kvtier.launch.prepare import prepare
from tests.unit.kvtier.boxes import planned

PLANNED = [
    "--max-model-len",
    "131072",
    "--enable-prefix-caching",
    "--kv-transfer-config",
    '{"kv_connector":"OffloadingConnector"}',
]


def test_users_value_wins_and_is_said() -> None:
    """A flag that the user gives replaces the plan's, in every spelling, and the conflict is said."""
    for spelling in (["--max-model-len", "4096"], ["--max-model-len=4096"], ["--max_model_len", "4096"]):
        merged = merge(PLANNED, spelling)
        assert "131072" not in merged.args
        assert merged.args[-len(spelling) :] == spelling
        assert len(merged.conflicts) == 1
        assert "--max-model-len 131072 of the plan gives way to your --max-model-len 4096" in merged.conflicts[0]


def test_equal_values_are_no_conflict() -> None:
    """Saying what the plan says anyway is no conflict, and is not said twice to vLLM."""
    merged = merge(PLANNED, ["--max-model-len", "131072"])
    assert merged.conflicts == []
    assert merged.args.count("--max-model-len") == 1


def test_size_flag_of_the_user_voids_the_connector() -> None:
    """vLLM's size flag would overwrite the plan's connector silently: the plan's is left out, and that is said."""
    merged = merge(PLANNED, ["--kv-offloading-size", "8"])
    assert "--kv-transfer-config" not in merged.args
    assert any("excludes it" in conflict for conflict in merged.conflicts)
    other = merge(["--kv-offloading-size", "32", "--kv-offloading-backend", "native"], ["--kv-transfer-config", "{}"])
    assert other.args == ["--kv-transfer-config", "{}"]
    assert len(other.conflicts) == 2


def test_flags_that_defeat_the_tier_are_said() -> None:
    """Switching prefix caching off is obeyed, and said to defeat the tier. Short names and dotted keys are
    understood."""
    merged = merge(PLANNED, ["--no-enable-prefix-caching"])
    assert "--enable-prefix-caching" not in merged.args
    assert any("no tier serves anything" in conflict for conflict in merged.conflicts)
    assert merge(["--tensor-parallel-size", "2"], ["-tp", "4"]).args == ["-tp", "4"]
    assert "--kv-transfer-config" not in merge(PLANNED, ["--kv-transfer-config.kv_role", "kv_both"]).args[:-2]


def test_arguments_without_conflict_are_kept() -> None:
    """Everything else of both is there, the plan's first."""
    assert merge(PLANNED, ["--port", "8001", "--seed", "-1"]).args == [*PLANNED, "--port", "8001", "--seed", "-1"]


def test_prepare_writes_the_lmcache_file_and_directory(tmp_path: Path) -> None:
    """Launch writes the LMCache file where the environment will point, and makes the tier's directory for its owner
    alone."""
    plan = planned("cpu-only", "llama-dense", nvme=str(tmp_path / "kv"), nvme_gib=4)
    plan = msgspec.structs.replace(plan)
    start = prepare(
        plan, ["--port", "1"], {"PYTHONHASHSEED": "7", "VLLM_CPU_KVCACHE_SPACE": "2", "HOME": str(tmp_path)}
    )
    assert yaml.safe_load(Path(start.env["LMCACHE_CONFIG_FILE"]).read_text()) == plan.lmcache_config
    assert Path(start.env["LMCACHE_CONFIG_FILE"]).is_relative_to(tmp_path / ".local/state/kvtier")
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert start.command[0] == sys.executable and start.command[-2:] == ["--port", "1"]
    assert "PYTHONHASHSEED" not in start.env and "VLLM_CPU_KVCACHE_SPACE" not in start.env
    assert len(start.conflicts) == 2
    random = prepare(plan, [], {"PYTHONHASHSEED": "random", "HOME": str(tmp_path)})
    assert random.env["PYTHONHASHSEED"] == "0"
    assert any("gives way" in conflict for conflict in random.conflicts)


def test_share_of_the_users_replaces_a_fixed_pool() -> None:
    """A fixed pool overrides --gpu-memory-utilization: the user's share has it left out, and that is said."""
    merged = merge(["--kv-cache-memory-bytes", "1000", "--enable-prefix-caching"], ["--gpu-memory-utilization=0.5"])
    assert merged.args == ["--enable-prefix-caching", "--gpu-memory-utilization=0.5"]
    assert any("--kv-cache-memory-bytes 1000" in conflict for conflict in merged.conflicts)


@pytest.mark.parametrize(
    "users",
    [
        ["--kv-offloading-size", "8"],
        ["--kv_offloading_size=8"],
        ["--kv-transfer-config", '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'],
        ['--kv-transfer-config={"kv_connector":"SimpleCPUOffloadConnector"}'],
        ["--kv-transfer-config.kv_connector", "OffloadingConnector"],
        [
            "--kv-transfer-config",
            '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":'
            '[{"kv_connector":"OffloadingConnector"}]}}',
        ],
    ],
)
def test_ram_asked_for_on_unified_memory_is_said(users: list[str], tmp_path: Path) -> None:
    """A RAM tier after -- on unified memory is passed on, and said to be taken from the model; elsewhere it is not."""
    here = {"HOME": str(tmp_path)}
    start = prepare(planned("dgx-spark", "qwen3-gqa"), users, here, write=False)
    assert start.command[-len(users) :] == users
    said = [conflict for conflict in start.conflicts if "taken from the model" in conflict]
    assert len(said) == 1 and "asked for and is passed on" in said[0]
    other = prepare(planned("rtx-5090", "qwen3-gqa"), users, here, write=False)
    assert not any("taken from the model" in conflict for conflict in other.conflicts)


def test_disk_connector_of_the_users_is_no_ram() -> None:
    """vLLM's disk-only connector after -- takes no RAM."""
    disk = '{"kv_connector":"SimpleCPUOffloadConnector","kv_connector_extra_config":{"kv_offload_backend":"disk"}}'
    start = prepare(planned("dgx-spark", "qwen3-gqa"), ["--kv-transfer-config", disk], {}, write=False)
    assert not any("taken from the model" in conflict for conflict in start.conflicts)


def test_context_of_the_users_beyond_the_pool_is_said() -> None:
    """A --max-model-len after -- that the plan's pool does not hold is said to end the start."""
    plan = planned("cpu-only", "llama-dense")
    longer = prepare(plan, ["--max-model-len", "32768"], {}, write=False).conflicts
    assert any("will not start" in conflict for conflict in longer)
    assert not any("will not start" in c for c in prepare(plan, ["--max-model-len", "4096"], {}, write=False).conflicts)


def test_prepare_without_writing_leaves_no_trace(tmp_path: Path) -> None:
    """Without `write` neither the LMCache file nor the tier's directory is made; the file's name is the same."""
    plan = planned("cpu-only", "llama-dense", nvme=str(tmp_path / "kv"), nvme_gib=4)
    start = prepare(plan, [], {"HOME": str(tmp_path)}, write=False)
    assert list(tmp_path.iterdir()) == []
    assert prepare(plan, [], {"HOME": str(tmp_path)}).env == start.env


def leak(folder: Path, name: str = "vllm_offload_x.mmap") -> Path:
    path = folder / name
    path.write_bytes(b"x" * 8192)
    return path


def test_sweep_takes_leaks_and_leaves_held_and_foreign_files(tmp_path: Path) -> None:
    """A map that no process holds goes; one that a process has open, one that is young, and other files stay."""
    gone, held, other = leak(tmp_path), leak(tmp_path, "vllm_offload_y.mmap"), leak(tmp_path, "something_else.mmap")
    with held.open("rb"):
        assert sweep.sweep(tmp_path) == []  # all are young
        assert [found.path for found in sweep.sweep(tmp_path, young_s=0)] == [gone]
    assert held.exists() and other.exists() and not gone.exists()
    assert [found.path for found in sweep.sweep(tmp_path, young_s=0)] == [held]


def test_sweep_leaves_what_is_only_mapped(tmp_path: Path) -> None:
    """A map whose file was closed but that is still mapped stays."""
    import mmap

    path = leak(tmp_path)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    try:
        assert sweep.leaks(tmp_path, young_s=0) == []
    finally:
        mapped.close()
    assert [found.path for found in sweep.leaks(tmp_path, young_s=0)] == [path]


def test_follower_knows_up_and_figures() -> None:
    """The follower knows the line that says the engine is up, and the figures before it."""
    follower = Follower()
    assert not follower.feed("INFO GPU KV cache size: 159,448 tokens")
    assert not follower.feed("INFO Maximum concurrency for 131,072 tokens per request: 1.22x")
    assert follower.feed("INFO:     Application startup complete.")
    assert not follower.feed("INFO:     Application startup complete.")
    assert (follower.figures.pool_tokens, follower.figures.max_concurrency) == (159448, 1.22)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("ValueError: Insufficient space in /dev/shm for x: 16354.0 MiB required, 16352.0 MiB free", "remount"),
        ("ValueError: Failed to promote local KV cache specs to one unified type", "hybrid"),
        (
            "ValueError: To serve at least one request with the model's max seq len (32768), (16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (5.00 GiB). Based on the available memory, the "
            "estimated maximum model length is 10240.",
            "lower --max-model-len",
        ),
        ("OSError: [Errno 98] address already in use", "--port"),
    ],
)
def test_failures_get_a_hint(line: str, hint: str) -> None:
    """Known failures at start are explained."""
    follower = Follower()
    follower.feed(line)
    assert hint in follower.hints[0]


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""


def run_child(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    """launch.run around a Python child, in a process of its own."""
    program = (
        "import os, sys\nfrom kvtier.launch.run import run\n"
        f"sys.exit(run([sys.executable, '-c', {code!r}], os.environ, lambda line: print(line, flush=True)))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_signals_are_passed_on_and_exit_code_is_the_childs(tmp_path: Path) -> None:
    """SIGTERM reaches the child, and its exit code is ours; a child ended by a signal gives 128 + n."""
    process = run_child(CHILD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 7
    assert run_child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path).wait(timeout=20) == 137
    assert run_child("raise SystemExit(3)", tmp_path).wait(timeout=20) == 3


def test_child_ends_when_launch_is_killed(tmp_path: Path) -> None:
    """A launch that is killed takes the engine with it."""
    process = run_child(CHILD.replace('print("ready"', "import os; print(os.getpid()"), tmp_path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]:
            break
        threading.Event().wait(0.05)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
