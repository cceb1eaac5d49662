"""`kvtier render --door mp`: LMCache's server and the engine that uses it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier import facts as facts_file
from kvtier.cli import app
from kvtier.plan.decide import plan as decide
from kvtier.plan.result import Plan
from kvtier.plan.wishes import Wishes
from kvtier.render import lmcache_server
from kvtier.units import GIB
from lmcache_nvme_backend.doors.mp.params import parse_params
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier import examples
from tests.unit.kvtier.boxes import UNIT

EXAMPLES = Path(__file__).parents[3] / "configs/examples"


def made(name: str = "cpu-laptop") -> Plan:
    return examples.make(next(example for example in examples.EXAMPLES if example.name == name), UNIT)


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_examples_are_what_is_rendered() -> None:
    """configs/examples/lmcache-server holds exactly what `kvtier render --door mp` prints today."""
    rendered = examples.server_files(UNIT)
    assert {name: (EXAMPLES / name).read_text() for name in rendered} == rendered


def test_the_adapter_accepts_what_is_rendered() -> None:
    """The door's own parser reads the settings, and they are the plan's."""
    plan = made()
    server, _ = commands(lmcache_server.render(plan, "redis://kv.example"))
    adapter = json.loads(value(server, "--l2-adapter"))
    assert (adapter["type"], adapter["class_name"]) == ("plugin", "NvmeL2Adapter")
    settings = parse_params(adapter["adapter_params"])
    assert settings.tier.path == "/var/lib/kv-cache" and settings.tier.quota_gib == 32
    assert settings.behind == {"type": "resp", "host": "kv.example", "port": 6379}


def test_both_sides_meet() -> None:
    """The engine's connector names the server's address, asks for the mark, and recomputes what cannot be loaded; the
    rest of its arguments are the plan's."""
    plan = made()
    server, engine = commands(lmcache_server.render(plan))
    connector = json.loads(value(engine, "--kv-transfer-config"))
    extra = connector["kv_connector_extra_config"]
    assert extra["lmcache.mp.host"] == f"tcp://{value(server, '--host')}"
    assert extra["lmcache.mp.port"] == int(value(server, "--port"))
    assert extra["kvtier.identity"] == "auto" and connector["kv_load_failure_policy"] == "recompute"
    assert not any(word.startswith("LMCACHE_CONFIG_FILE") for word in engine)
    plain = [word for word in plan.vllm_args if "kv_connector" not in word]
    assert [word for word in engine if word in plain][-len(plain) :] == plain


def test_lmcaches_memory_holds_the_longest_hit() -> None:
    """A hit is in L1 all at once, below the share from which LMCache evicts."""
    plan = made()
    longest = plan.kv_bytes_per_token * plan.max_model_len
    assert lmcache_server.l1_gib(plan) * GIB * 0.8 >= longest
    assert (lmcache_server.l1_gib(plan) - 1) * GIB * 0.8 < longest


def test_on_shared_memory_the_kv_pool_makes_room_for_lmcaches() -> None:
    """What L1 holds is taken from the pool, which still holds one context; where it would not, the error names the
    length that fits, and that length fits."""
    facts = facts_file.load(UNIT / "facts/dgx-spark.json")
    model = str(UNIT / "models/qwen3-gqa")

    def planned(length: int) -> Plan:
        return decide(facts, model, Wishes(nvme="/mnt/kv-cache", nvme_gib=64, max_model_len=length))

    plan = planned(32768)
    _, engine = commands(lmcache_server.render(plan))
    before, after = (int(value(words, "--kv-cache-memory-bytes")) for words in (plan.vllm_args, engine))
    assert before - after == lmcache_server.l1_gib(plan) * GIB
    assert plan.tiers[0].name == "pool" and after * plan.tiers[0].tokens >= before * plan.max_model_len
    with pytest.raises(ConfigError, match="--max-model-len") as caught:
        lmcache_server.render(planned(131072))
    fits = int(caught.value.allowed.removeprefix("at most "))
    lmcache_server.render(planned(fits))
    with pytest.raises(ConfigError, match="--max-model-len"):
        lmcache_server.render(planned(fits + 16384))


def test_a_password_is_on_no_command_line() -> None:
    """Everybody on the host can read a process's arguments."""
    server, _ = commands(lmcache_server.render(made(), "redis://kv:s%3Acret@[::1]:7000"))
    assert "LMCACHE_RESP_PASSWORD=s:cret" in server and "LMCACHE_RESP_USERNAME=kv" in server
    behind = json.loads(value(server, "--l2-adapter"))["adapter_params"]["behind"]
    assert behind == {"type": "resp", "host": "::1", "port": 7000}


def test_any_adapter_of_lmcache_that_hosts_share_can_stand_behind() -> None:
    """A JSON object goes through as it is, but for secrets that LMCache finds in the environment as well."""
    spec: dict[str, Any] = {"type": "s3", "s3_endpoint": "s3://kv.s3.example", "s3_region": "eu"}
    secret = {"aws_access_key_id": "id", "aws_secret_access_key": "hid den"}
    for given in (spec, spec | secret):
        server, _ = commands(lmcache_server.render(made(), json.dumps(given)))
        assert json.loads(value(server, "--l2-adapter"))["adapter_params"]["behind"] == spec
    assert "AWS_SECRET_ACCESS_KEY=hid den" in server and "AWS_ACCESS_KEY_ID=id" in server
    redis = {"type": "resp", "host": "kv.example", "port": 6379}
    server, _ = commands(lmcache_server.render(made(), json.dumps({**redis, "password": "s:cret"})))
    assert "LMCACHE_RESP_PASSWORD=s:cret" in server
    assert json.loads(value(server, "--l2-adapter"))["adapter_params"]["behind"] == redis


@pytest.mark.parametrize(
    "text",
    [
        *("rediss://host", "redis://", "host:6379", "redis://host/3", "{", '{"host": "x"}', "redis://h:x"),
        *('{"type": "nixl_store"}', '{"type": "mock"}', '{"type": "fs", "base_path": "/x", "serde": {}}'),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    """The error names the option and says what is allowed."""
    with pytest.raises(ConfigError, match="--behind"):
        lmcache_server.render(made(), text)


def test_a_plan_without_this_tier_is_refused() -> None:
    """A RAM tier has no use for LMCache's server, and a plan of several hosts is not one server's."""
    for name in ("rtx-5090", "dgx-spark-pair"):
        with pytest.raises(ConfigError, match="--door"):
            lmcache_server.render(made(name))


def test_the_command_line_renders_it(tmp_path: Path) -> None:
    """`kvtier render MODEL --door mp --behind URL`; options that do not go together are an error."""
    model = str(UNIT / "models/llama-dense")
    facts = str(UNIT / "facts/cpu-only.json")
    base = ["render", model, "--facts", facts, "--nvme", "/var/lib/kv-cache", "--nvme-gib", "32"]
    done = CliRunner().invoke(app, [*base, "--door", "mp", "--behind", "redis://kv.example:6379"])
    assert done.exit_code == 0 and len(commands(done.stdout)) == 2
    for wrong in (["--door", "other"], ["--door", "mp", "--format", "k8s"], ["--behind", "redis://kv.example"]):
        assert CliRunner().invoke(app, [*base, *wrong]).exit_code == 2
