import json
import socket
from pathlib import Path

from kvtier.engine import EngineSpec, free_port


def spec(**changes):
    return EngineSpec(**({"model": Path("/models/tiny"), "log": Path("/logs/e.log")} | changes))


def option(command, name):
    return command[command.index(name) + 1]


def test_a_failed_load_is_recomputed():
    """vLLM's default would end the request; every engine with the tier is told to recompute."""
    command = spec(lmcache_config=Path("/c.yaml")).command(1)
    assert json.loads(option(command, "--kv-transfer-config"))["kv_load_failure_policy"] == "recompute"


def test_an_engine_without_the_tier_has_no_connector():
    """Without an LMCache configuration nothing of LMCache is asked for."""
    plain = spec()
    assert "--kv-transfer-config" not in plain.command(1)
    assert "LMCACHE_CONFIG_FILE" not in plain.environment({})


def test_the_callers_arguments_come_last():
    """argparse takes the last of two, so a test can override what the harness chose."""
    assert spec(args=("--max-model-len", "77")).command(1)[-2:] == ["--max-model-len", "77"]


def test_a_persons_shell_does_not_change_the_run():
    """LMCache's and vLLM's variables of the shell are dropped, the rest is kept, the spec's own come last."""
    shell = {
        "HOME": "/h", "LMCACHE_CONFIG_FILE": "/other", "VLLM_PLUGINS": "", "PROMETHEUS_MULTIPROC_DIR": "/p",
        "PYTHONHASHSEED": "7",
    }  # fmt: skip
    env = spec(lmcache_config=Path("/c.yaml"), env={"PYTHONHASHSEED": "1"}).environment(shell)
    assert env["HOME"] == "/h"
    assert env["LMCACHE_CONFIG_FILE"] == "/c.yaml"
    assert env["PYTHONHASHSEED"] == "1"
    assert "VLLM_PLUGINS" not in env and "PROMETHEUS_MULTIPROC_DIR" not in env


def test_no_telemetry_leaves_the_machine():
    """Both vLLM's and LMCache's reporting are off, and the hub is not asked."""
    env = spec().environment({})
    assert (env["VLLM_NO_USAGE_STATS"], env["LMCACHE_TRACK_USAGE"], env["DO_NOT_TRACK"]) == ("1", "false", "1")
    assert env["HF_HUB_OFFLINE"] == "1"


def test_a_busy_port_gives_another_one():
    """A preferred port that is taken is no error."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
    assert free_port(port) == port
