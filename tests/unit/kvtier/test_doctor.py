"""Doctor without an engine: checks of a plan, and whether an environment reached a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvtier.doctor import engine_env
from kvtier.doctor.checks import Check
from kvtier.doctor.engine_checks import policy
from kvtier.doctor.plan_checks import before_start
from kvtier.facts import Facts, Versions
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import argument, facts, planned


def statuses(box: Facts, model: str, environment: dict[str, str] | None = None, **wishes: object) -> dict[str, str]:
    return {
        check.name: check.status.value for check in before_start(box, planned(box, model, **wishes), environment or {})
    }


def test_needed_patch_fails_with_its_command() -> None:
    """A patch that is needed and not applied fails, with the command; applied, it passes."""
    box = msgspec.structs.replace(facts("arc-pro-b70"), patches={"vllm-52771": "needed", "vllm-52807": "applied"})
    checks = {
        check.name: check for check in before_start(box, planned(box, "qwen3_5-hybrid-mtp", spec="mtp", ram_gib=16), {})
    }
    assert checks["patch vllm-52771"].status == "fail"
    assert "kvtier patch apply vllm-52771" in (checks["patch vllm-52771"].fix or "")
    assert checks["patch vllm-52807"].status == "pass"


def test_refusal_fails_with_the_remount_command() -> None:
    """A refused plan fails by the name of its rule, with the command that mends it."""
    box = facts("container-small-shm")
    check = next(check for check in before_start(box, planned(box, "qwen3-gqa"), {}) if check.name == "shm-too-small")
    assert check.status == "fail" and "--ipc=host" in (check.fix or "")


def test_versions_are_checked() -> None:
    """No vLLM fails; an untested LMCache warns; a missing one fails."""
    box = facts("dgx-spark")
    assert statuses(msgspec.structs.replace(box, versions=Versions()), "qwen3-gqa")["vllm"] == "fail"
    assert statuses(msgspec.structs.replace(box, versions=Versions(vllm="0.32.0")), "qwen3-gqa")["lmcache"] == "fail"
    assert (
        statuses(msgspec.structs.replace(box, versions=Versions(vllm="0.32.0", lmcache="0.4.9")), "qwen3-gqa")[
            "lmcache"
        ]
        == "warn"
    )


def test_a_plan_of_the_native_door_needs_this_package_and_not_lmcache() -> None:
    """LMCache is not asked for; a filter that leaves this package's plugin out fails all the same."""
    box = msgspec.structs.replace(facts("dgx-spark"), versions=Versions(vllm="0.32.0"))
    found = statuses(box, "qwen3_5-hybrid", {"VLLM_PLUGINS": "other"})
    assert found["decision"] == "pass" and found["plugin"] == "fail" and found["nvme-spec-on-device"] == "warn"
    assert "lmcache" not in found and "fail" not in (found["load-failure-policy"], found["hash-seed"])


def test_filtered_plugin_and_random_seed() -> None:
    """VLLM_PLUGINS that leaves the plugin out, or a missing plugin, fails; a random hash seed warns."""
    found = statuses(facts("dgx-spark"), "qwen3-gqa", {"VLLM_PLUGINS": "other", "PYTHONHASHSEED": "random"})
    assert found["plugin"] == "fail"
    assert found["hash-seed"] == "warn"


def test_swap_and_descriptors_warn() -> None:
    """Swap on unified memory and few file descriptors warn."""
    found = statuses(facts("dgx-spark"), "qwen3-gqa")
    assert found["swap"] == "warn"
    assert found["open-files"] == "warn"


def test_environment_of_a_process_is_read(tmp_path: Path) -> None:
    """The check reads a process's real environment: what it has passes, what it lacks fails."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "waits.py").write_text(
        "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.waits"],
        env={"PYTHONHASHSEED": "0"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout and process.stdout.read(1) == b"x"
        assert process.pid in engine_env.engine_processes()
        mine = {check.name: check for check in engine_env.check({"PYTHONHASHSEED": "0"})}[f"engine-env {process.pid}"]
        assert mine.status == "pass"
        lacking = {check.name: check for check in engine_env.check({"LMCACHE_CONFIG_FILE": "/x"})}[
            f"engine-env {process.pid}"
        ]
        assert lacking.status == "fail" and "not set" in lacking.sentence
    finally:
        process.kill()
        process.wait()


def test_titled_process_is_told_by_its_parent(tmp_path: Path) -> None:
    """A process that wrote its title over its environment is judged by the parent that gave it one."""
    for pid, parent, command, environ in (
        (100, 1, b"python\0-m\0vllm.entrypoints.x\0", b"PYTHONHASHSEED=0\0PATH=/\0"),
        (101, 100, b"VLLM::Worker\0", b"::Worker\0"),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_bytes(command)
        (folder / "environ").write_bytes(environ)
        (folder / "stat").write_text(f"{pid} (some (odd) name) S {parent} 1 1 0")
    checks = {check.name: check for check in engine_env.check({"PYTHONHASHSEED": "0"}, tmp_path)}
    assert checks["engine-env 101"].status == "pass"
    assert "told by its parent 100" in checks["engine-env 101"].sentence


def test_no_engine_here_fails(tmp_path: Path) -> None:
    """Where no vLLM runs, the check fails rather than passes for want of processes; a malformed --expect is an
    error."""
    assert engine_env.check({"A": "1"}, tmp_path)[0].status == "fail"
    with pytest.raises(ConfigError, match="--expect"):
        engine_env.expected(["novalue"])


def test_pool_that_holds_no_context_fails() -> None:
    """A context shortened to the pool warns; a smaller VLLM_CPU_KVCACHE_SPACE in the environment fails the check."""
    found = statuses(facts("cpu-only"), "llama-dense")
    assert found["context"] == "pass" and found["context-fits-pool"] == "warn"
    assert statuses(facts("cpu-only"), "llama-dense", {"VLLM_CPU_KVCACHE_SPACE": "1"})["context"] == "fail"
    assert statuses(facts("cpu-only"), "llama-dense", {"VLLM_CPU_KVCACHE_SPACE": "40"})["context"] == "pass"
    plan, small = planned("cpu-only", "llama-dense"), {"VLLM_CPU_KVCACHE_SPACE": "1"}
    shorter = before_start(facts("cpu-only"), plan, small, ["--max-model-len", "1024"])
    assert "context" not in {check.name for check in shorter}
    box = msgspec.structs.replace(facts("cpu-only"), environment=small)
    assert argument(planned(box, "llama-dense"), "--max-model-len") == "2048"


def test_directory_that_is_still_to_be_made(tmp_path: Path) -> None:
    """A directory that does not exist is said to be made by launch; a file in its place fails."""

    def nvme(path: Path) -> Check:
        plan = planned("dgx-spark", "qwen3-gqa", nvme=str(path), nvme_gib=4)
        return next(check for check in before_start(facts("dgx-spark"), plan, {}) if check.name == "nvme")

    assert "does not exist yet, launch makes it" in nvme(tmp_path / "new" / "kv").sentence
    assert "does not exist" not in nvme(tmp_path).sentence
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert nvme(tmp_path / "file").status == "fail" and nvme(tmp_path / "file" / "kv").status == "fail"


def test_policy_is_read_in_every_spelling() -> None:
    """--kv-transfer-config with =, dotted, and the size flag, which configures a connector too."""
    recompute, other = '{"kv_load_failure_policy":"recompute"}', '{"kv_connector":"X"}'
    assert policy(["vllm", f"--kv-transfer-config={other}"]).status == "fail"
    assert policy(["vllm", f"--kv-transfer-config={recompute}"]).status == "pass"
    assert policy(["vllm", "--kv_transfer_config", other]).status == "fail"
    assert policy(["vllm", "--kv-transfer-config.kv_load_failure_policy", "recompute"]).status == "pass"
    assert policy(["vllm", "--kv-transfer-config=[]"]).status == "warn"
    size = policy(["vllm", "--kv-offloading-size", "8"])
    assert size.status == "pass" and "fail, the default" in size.sentence
    assert policy(["vllm", "--kv-offloading-size=8", "--kv-offloading-backend", "lmcache"]).status == "fail"
    assert "no connector" in policy(["vllm"]).sentence


def test_allocator_fails_a_plan_with_a_connector_alone() -> None:
    """expandable_segments fails the check of a plan with a connector, and not that of one without."""
    box = msgspec.structs.replace(facts("rtx-5090"), environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert statuses(box, "qwen3-gqa")["expandable-segments"] == "fail"
    assert "expandable-segments" not in statuses(box, "mamba")
