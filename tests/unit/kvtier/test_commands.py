"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.detect import software
from tests.unit.kvtier.boxes import UNIT, model

B70 = [
    "plan",
    model("qwen3_5-hybrid-mtp"),
    "--facts",
    str(UNIT / "facts/arc-pro-b70.json"),
    "--ram-gib",
    "16",
    "--nvme-gib",
    "64",
]


def kvtier(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_plan_json_has_the_promised_keys() -> None:
    """A plan's JSON has decision, reasons, vllm_args, env, lmcache_config, kv_bytes_per_token and tiers."""
    done = kvtier(*B70, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {"decision", "reasons", "vllm_args", "env", "lmcache_config", "kv_bytes_per_token", "tiers"} <= set(plan)
    assert plan["decision"] == "native-ram-nvme"
    assert {"rule", "sentence"} <= set(plan["reasons"][0])
    assert {"name", "bytes", "tokens", "full_contexts"} <= set(plan["tiers"][0])


def test_explain_prints_every_rule() -> None:
    """--explain prints each rule's name and sentence."""
    plan = json.loads(kvtier(*B70, "--json").stdout)
    text = kvtier(*B70, "--explain").stdout
    for reason in plan["reasons"]:
        assert f"{reason['rule']}: " in text


@pytest.mark.parametrize(
    "bad",
    [
        ["--ram-gib", "0"],
        ["--ram-gib", "-4"],
        ["--ram-gib", "1.5"],
        ["--nvme-gib", "900000"],
        ["--nvme", "relative"],
        ["--spec", "magic"],
        ["--engine", "other"],
        ["--memory", "shared"],
        ["--nodes", "2"],
        ["--tp", "2"],
        ["--target-vllm", "latest"],
        ["--link-gbps", "nan"],
        ["--nvme-gbps", "0"],
        ["--prefill-tps", "-5"],
        ["--kv-cache-dtype", "int8"],
        ["--log", "http://127.0.0.1:9"],
    ],
)
def test_mistakes_are_one_clear_error(bad: list[str]) -> None:
    """A wrong option ends with exit code 2 and one message that names it, without a traceback."""
    done = kvtier(*B70, *bad)
    assert done.returncode == 2
    assert bad[0] in done.stderr and "allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_mistakes_are_json_too() -> None:
    """With --json the error is JSON on standard output."""
    error = json.loads(kvtier(*B70, "--ram-gib", "0", "--json").stdout)["error"]
    assert error["setting"] == "--ram-gib"


def test_refusal_has_exit_code_one() -> None:
    """A refused plan prints why, and ends with 1."""
    done = kvtier("plan", model("qwen3-gqa"), "--facts", str(UNIT / "facts/dgx-spark.json"), "--ram-gib", "8")
    assert done.returncode == 1
    assert "refused" in done.stdout and "one DRAM" in done.stdout


def test_detect_prints_a_facts_file(tmp_path) -> None:
    """What `detect --json` prints is a facts file that plan takes."""
    done = kvtier("detect", "--json")
    assert done.returncode == 0
    (tmp_path / "facts.json").write_text(done.stdout)
    again = kvtier("plan", model("mamba"), "--facts", str(tmp_path / "facts.json"), "--json")
    assert json.loads(again.stdout)["decision"] == "none"
    assert json.loads(kvtier("detect", "--json", "--memory", "unified").stdout)["memory"] == "unified"


def test_facts_file_that_is_none() -> None:
    """A file that is no facts file is one clear error."""
    done = kvtier("plan", model("mamba"), "--facts", str(UNIT / "decisions.txt"))
    assert done.returncode == 2 and "--facts" in done.stderr


def test_unreachable_engine_is_one_clear_error() -> None:
    """doctor, watch and acid-test say that nothing answers."""
    for command in (["doctor", "--url", "http://127.0.0.1:9"], ["acid-test", "--url", "http://127.0.0.1:9"]):
        done = kvtier(*command)
        assert done.returncode == 2 and "--url" in done.stderr and "Traceback" not in done.stderr


def test_launch_dry_run_says_conflicts(tmp_path) -> None:
    """launch --dry-run prints what it would start; what comes after -- wins, and the conflict is said."""
    done = kvtier(
        "launch",
        model("qwen3-gqa"),
        "--facts",
        str(UNIT / "facts/rtx-5090.json"),
        "--ram-gib",
        "8",
        "--dry-run",
        "--",
        "--kv-offloading-size",
        "4",
    )
    assert done.returncode == 0, done.stderr
    assert "--kv-offloading-size 4" in done.stdout and "--kv-offloading-size 8" not in done.stdout
    assert "conflict" in done.stderr


SPARK = [model("qwen3-gqa"), "--facts", str(UNIT / "facts/dgx-spark.json")]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["detect", "--nvme", "/"], "--nvme"),
        (["detect", "--measure", "--nvme", "/nowhere/at/all"], "--nvme"),
        (["doctor", "--expect", "A=1"], "--expect"),
        (["watch", "--url", "http://127.0.0.1:9", "--interval", "inf"], "--interval"),
        (["watch", "--url", "http://127.0.0.1:9", "--looks", "-1"], "--looks"),
        (["acid-test", "--url", "http://127.0.0.1:9", "--parallel", "-1"], "--parallel"),
    ],
)
def test_other_commands_mistakes_are_one_error(words: list[str], named: str) -> None:
    """What makes no sense together or as a number is exit code 2 and one message that names it."""
    done = kvtier(*words)
    assert done.returncode == 2 and named in done.stderr and "allowed" in done.stderr
    assert "Traceback" not in done.stderr


def test_watch_of_nothing_ends_with_one() -> None:
    """watch ends with 1 where no engine answers, with and without an end of its own."""
    for more in ([], ["--looks", "1"], ["--looks", "1", "--json"]):
        done = kvtier("watch", "--url", "http://127.0.0.1:9", *more)
        assert done.returncode == 1 and "127.0.0.1:9" in done.stderr


def test_render_and_plan_end_alike() -> None:
    """A refused plan ends render with 1, as it does plan."""
    for words in (["plan"], ["render"], ["render", "--json"]):
        done = kvtier(*words, *SPARK, "--ram-gib", "8")
        assert done.returncode == 1 and "one DRAM" in done.stdout + done.stderr
    assert kvtier("render", *SPARK, "--format", "other").returncode == 2


def launch(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A dry run of RAM and NVMe on the RTX 5090 box, which needs no plugin here, with a home of its own."""
    return kvtier(
        "launch", model("qwen3-gqa"), "--facts", str(UNIT / "facts/rtx-5090.json"), "--ram-gib", "8", "--nvme-gib", "4",
        "--nvme", str(tmp_path / "kv"), "--dry-run", *words, HOME=str(tmp_path), XDG_STATE_HOME="", **environment,
    )  # fmt: skip


def test_launch_says_json_and_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    """--json gives JSON for a dry run, which writes and creates nothing, and for a refusal; a plan for another vLLM
    than the installed one is said to be that."""
    done = launch(tmp_path, "--json", "--target-vllm", "v0.24.1")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["event"], shown["decision"]) == ("dry-run", "native-ram-nvme")
    assert "--kv-transfer-config" in shown["command"] and shown["env"] == {"PYTHONHASHSEED": "0"}
    installed = software.versions().vllm
    assert any("0.24.1" in conflict for conflict in shown["conflicts"]) == (installed is not None)
    assert list(tmp_path.iterdir()) == []
    refused = kvtier("launch", *SPARK, "--ram-gib", "8", "--json")
    assert refused.returncode == 1
    told = json.loads(refused.stdout)
    assert (told["event"], told["decision"]) == ("stopped", "refused")
    assert any(check["name"] == "unified-refuses-ram" for check in told["checks"])


def test_launch_looks_at_the_environment_it_hands_on(tmp_path: Path) -> None:
    """expandable_segments in launch's own environment is refused with a facts file too, and not without a connector."""
    bad = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = launch(tmp_path, "--json", **bad)
    assert done.returncode == 1
    assert any(check["name"] == "expandable-segments" for check in json.loads(done.stdout)["checks"])
    free = kvtier("launch", model("mamba"), "--facts", str(UNIT / "facts/rtx-5090.json"), "--dry-run", **bad)
    assert free.returncode == 0, free.stderr


def test_importing_the_commands_imports_no_torch() -> None:
    """No torch, vLLM or LMCache is needed for anything but what asks for them."""
    code = (
        "import sys, kvtier.cli; sys.exit(str(bad) if (bad := {'torch', 'vllm', 'lmcache'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
