"""The acid test against real engines: this project's disk tier under `kvtier launch`, vLLM's tiering, and a broken
one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.acid.result import Result, Verdict
from kvtier.launch import sweep
from tests.engine.support.served import Served, free_port, kvtier, small_pool_arguments

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("lmcache", reason="needs LMCache")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENT = 1500
RAM_TIER = 32 << 20
SPECS = {
    "CpuTieringOffloadingSpec": "lmcache_nvme_backend",
    "StoresButNeverServes": "tests.engine.support.cpu_tiering",
}


@pytest.fixture(scope="module")
def tiny_model() -> str:
    """A Llama with random weights, 2 KiB of KV a token."""
    from kvtier.model import find_model

    return str(find_model("random", print))


def acid_test(engine: Served, *words: str) -> tuple[Result, int]:
    """Run `kvtier acid-test --json` as a person would; its result and exit code."""
    done = subprocess.run(
        kvtier("acid-test", "--url", engine.url, "--tokens", str(DOCUMENT), "--json", *words),
        env=engine.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return msgspec.json.decode(done.stdout, type=Result), done.returncode


def doctor(engine: Served, *words: str) -> dict[str, dict[str, Any]]:
    """Checks of `kvtier doctor --json` by name."""
    done = subprocess.run(
        kvtier("doctor", "--json", *words), env=engine.env, capture_output=True, text=True, check=False
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def tiering_command(model: str, port: int, folder: Path, spec: str) -> list[str]:
    """vLLM with its real tiering: RAM, and an fs tier behind it."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "spec_module_path": SPECS[spec],
            "cpu_bytes_to_use": RAM_TIER,
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(folder / "fs"), "n_read_threads": 4, "n_write_threads": 4}
            ],
        },
    }
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--enable-prefix-caching",
        "--kv-transfer-config",
        json.dumps(config),
        *small_pool_arguments(port),
    ]


def maps(engine: Served) -> set[Path]:
    """The maps in /dev/shm that an engine's log names."""
    log = engine.log.read_text() if engine.log.exists() else ""
    return {Path(name) for name in re.findall(r"(/dev/shm/vllm_offload_\S+?\.mmap)", log)}


@pytest.fixture(scope="module")
def engines(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Three engines, started at the same time because a start is mostly imports: under `kvtier launch`, with real
    tiering, with broken tiering."""

    def make(name: str) -> Served:
        folder, port = tmp_path_factory.mktemp(name), free_port()
        if name == "launched":
            words = kvtier(
                "launch", tiny_model, "--nvme", str(folder / "kv"), "--nvme-gib", "1", "--", *small_pool_arguments(port)
            )
            return Served(words, port, folder)
        spec = {"tiering": "CpuTieringOffloadingSpec", "broken": "StoresButNeverServes"}[name]
        return Served(tiering_command(tiny_model, port, folder, spec), port, folder, {"PYTHONHASHSEED": "0"})

    made = {name: make(name) for name in ("launched", "tiering", "broken")}
    try:
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(Served.start, made.values()))
        yield made
    finally:
        for engine in made.values():
            engine.stop()
            for path in maps(engine):
                path.unlink(missing_ok=True)


@pytest.fixture
def launched(engines: dict[str, Served]) -> Served:
    """An engine under `kvtier launch` on this machine, with the plan's disk tier."""
    return engines["launched"]


def test_launched_engine_serves_from_nvme(launched: Served) -> None:
    """What `kvtier launch` starts here passes the acid test with "serves from NVMe", also across a restart."""
    with launched.restart_command() as restart:
        result, code = acid_test(launched, "--restart-command", restart)
    assert (result.verdict, code) == (Verdict.NVME, 0), result
    steps = {step.name: step for step in result.steps}
    assert list(steps) == ["cold", "repeat", "pressure", "after-pressure", "after-restart"]
    assert steps["cold"].computed == DOCUMENT
    assert steps["repeat"].from_pool > DOCUMENT // 2
    assert steps["after-pressure"].from_tier >= 1280
    assert steps["after-restart"].from_tier >= 1280
    assert steps["after-restart"].from_pool == 0
    assert result.parallel is not None
    assert (result.parallel.completed, result.parallel.failed) == (3, 0)


def test_launch_says_what_is_up(launched: Served) -> None:
    """Launch passes the log through and says pool, concurrency and tier sizes when the engine is up."""
    log = launched.log.read_text()
    assert "up: KV pool 4,096 tokens, maximum concurrency 2.00" in log
    assert "nvme: 1 GiB" in log
    assert "lmcache-nvme:" in log


def test_doctor_sees_the_launched_engine(launched: Served) -> None:
    """Doctor finds the tier, the failure policy and the environment of the running engine."""
    checks = doctor(launched, "--url", launched.url)
    assert checks["tier"]["status"] == "pass", checks["tier"]
    assert checks["load-failure-policy"]["sentence"] == "recompute"
    assert checks["hits"]["status"] == "pass"
    wrong = doctor(launched, "--engine-env", "--expect", "PYTHONHASHSEED=12345")
    assert any(check["status"] == "fail" for check in wrong.values())


def test_watch_shows_the_launched_engine(launched: Served) -> None:
    """Watch prints one look as JSON, with tokens by source and the change since the last."""
    done = subprocess.run(
        kvtier("watch", "--url", launched.url, "--looks", "2", "--interval", "0.5", "--json"),
        env=launched.env,
        capture_output=True,
        text=True,
        check=True,
    )
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 2
    assert looks[1][0]["snapshot"]["tokens"]["external_kv_transfer"] > 0
    assert looks[1][0]["change"]["seconds"] > 0


def test_launch_ends_with_vllms_exit_code(launched: Served) -> None:
    """SIGTERM to launch reaches vLLM, which ends; launch ends with vLLM's exit code and leaves no process."""
    process = launched.process
    assert process is not None
    assert launched.stop() == 0
    assert process.processes() == []


def test_real_tiering_serves_from_ram_then_nvme(engines: dict[str, Served]) -> None:
    """vLLM's own tiering: after pressure the document comes from host memory, after a restart from files."""
    engine = engines["tiering"]
    with engine.restart_command() as restart:
        result, code = acid_test(engine, "--restart-command", restart, "--parallel", "0")
    assert (result.verdict, code) == (Verdict.NVME, 0), result
    steps = {step.name: step for step in result.steps}
    assert steps["after-pressure"].from_tier_by.get("host", 0) >= DOCUMENT // 2
    assert steps["after-pressure"].disk_read_bytes == 0
    assert steps["after-restart"].from_tier_by.get("disk", 0) >= DOCUMENT // 2
    assert steps["after-restart"].disk_read_bytes > 0
    assert steps["cold"].stored_bytes > 0


def test_tiering_leaves_its_map_and_sweep_takes_it(engines: dict[str, Served]) -> None:
    """A running engine's map in /dev/shm is never swept; what it leaves behind at SIGTERM is."""
    engine = engines["tiering"]
    there = {path for path in maps(engine) if path.exists()}
    # Its log also names the map of the life before its restart, which may have been left behind.
    assert there - {found.path for found in sweep.leaks(young_s=0)}
    engine.stop()
    left = {path for path in there if path.exists()}
    assert left <= {found.path for found in sweep.leaks(young_s=0)}
    for path in left:
        path.unlink()


def test_broken_tiering_is_found_out(engines: dict[str, Served]) -> None:
    """A tier that stores and never serves is called that, with a likely cause, and exit code 1."""
    engine = engines["broken"]
    result, code = acid_test(engine, "--parallel", "0")
    checks = doctor(engine, "--url", engine.url)
    assert (result.verdict, code) == (Verdict.STORES_ONLY, 1), result
    assert result.likely_causes
    assert {step.name: step.from_tier for step in result.steps}["after-pressure"] == 0
    assert checks["tier"]["status"] == "pass"
