"""Rendered text: the examples are regenerated and compared, and every format reads back as what was planned."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvtier.render.formats import FORMATS, render
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier import examples
from tests.unit.kvtier.boxes import BOXES, UNIT, planned

EXAMPLES = UNIT.parents[1] / "configs" / "examples"
RANKS = [
    (example, rank) for example in examples.EXAMPLES for rank in range(2 if example.name == "dgx-spark-pair" else 1)
]
each_example = pytest.mark.parametrize(("example", "rank"), RANKS, ids=lambda value: getattr(value, "name", str(value)))


def words(example: examples.Example, rank: int) -> list[str]:
    """The command line that the plan means."""
    plan = examples.make(example, UNIT)
    return [*plan.command, *(plan.nodes[rank].vllm_args if plan.nodes else plan.vllm_args)]


@pytest.mark.parametrize("example", examples.EXAMPLES, ids=lambda example: example.name)
def test_examples_are_what_is_rendered(example: examples.Example) -> None:
    """configs/examples/ holds exactly what `kvtier render` prints today."""
    rendered = examples.files(example, UNIT)
    assert {name: (EXAMPLES / name).read_text() for name in rendered} == rendered
    assert {str(path.relative_to(EXAMPLES)) for path in (EXAMPLES / example.name).iterdir()} == set(rendered)


@each_example
def test_args_read_back(example: examples.Example, rank: int) -> None:
    """A shell reads the command line back word for word."""
    assert shlex.split(render(examples.make(example, UNIT), "args", rank)) == words(example, rank)


@each_example
def test_compose_reads_back(example: examples.Example, rank: int) -> None:
    """The compose service starts the same words, with the environment and LMCache configuration of the plan."""
    plan = examples.make(example, UNIT)
    document = yaml.safe_load(render(plan, "compose", rank))
    (service,) = document["services"].values()
    assert [word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"])] == words(example, rank)
    assert service["environment"] == (plan.nodes[rank].env if plan.nodes else plan.env)
    assert service["ipc"] == "host"
    if plan.lmcache_config:
        wanted = plan.nodes[rank].lmcache_config if plan.nodes else plan.lmcache_config
        assert yaml.safe_load(document["configs"]["lmcache"]["content"]) == wanted
        assert service["configs"][0]["target"] == service["environment"]["LMCACHE_CONFIG_FILE"]


@each_example
def test_systemd_reads_back(example: examples.Example, rank: int) -> None:
    """The unit's ExecStart, unquoted by systemd's rules, is the same words; limits and stop time are set."""
    unit = render(examples.make(example, UNIT), "systemd", rank)
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    back = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]
    assert back == ["/usr/bin/env", *words(example, rank)]
    assert "LimitMEMLOCK=infinity" in unit and "TimeoutStopSec=" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@each_example
def test_systemd_accepts_the_unit(example: examples.Example, rank: int, tmp_path: Path) -> None:
    """systemd's own checker has nothing to say about the unit."""
    unit = tmp_path / "vllm.service"
    unit.write_text(render(examples.make(example, UNIT), "systemd", rank))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(unit) not in done.stderr


@each_example
def test_k8s_reads_back(example: examples.Example, rank: int) -> None:
    """The pod runs the same words; /dev/shm holds the RAM tier and more; the ConfigMap lies where the engine looks."""
    plan = examples.make(example, UNIT)
    documents = list(yaml.safe_load_all(render(plan, "k8s", rank)))
    pod = documents[-1]
    (container,) = pod["spec"]["containers"]
    assert [*container["command"], *container["args"]] == words(example, rank)
    shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"]
    ram = next((tier.bytes for tier in plan.tiers if tier.name == "ram"), 0)
    assert int(shm.removesuffix("Gi")) << 30 > ram
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    if plan.lmcache_config:
        folder = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "lmcache")
        (file,) = documents[0]["data"]
        assert f"{folder}/{file}" == environment["LMCACHE_CONFIG_FILE"]


@each_example
def test_env_and_yaml_read_back(example: examples.Example, rank: int) -> None:
    """The environment file and the LMCache YAML are the plan's."""
    plan = examples.make(example, UNIT)
    lines = dict(line.split("=", 1) for line in render(plan, "env", rank).splitlines())
    assert lines == (plan.nodes[rank].env if plan.nodes else plan.env)
    wanted = plan.nodes[rank].lmcache_config if plan.nodes else plan.lmcache_config
    assert yaml.safe_load(render(plan, "yaml", rank)) == (wanted or {})


def test_lmcache_keys_are_those_of_the_reference_entry() -> None:
    """The rendered LMCache configuration has the keys of configs/examples/lmcache-nvme.yaml, and only those."""
    wanted = yaml.safe_load((EXAMPLES / "lmcache-nvme.yaml").read_text())
    rendered = yaml.safe_load(render(planned("dgx-spark", "qwen3-gqa", nvme="/mnt/kv-cache", nvme_gib=64), "yaml"))
    assert {key: rendered[key] for key in rendered if key != "extra_config"} == {
        key: wanted[key] for key in wanted if key != "extra_config"
    }
    assert set(rendered["extra_config"]) <= set(wanted["extra_config"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("box", BOXES)
def test_every_plan_renders(box: str, form: str) -> None:
    """Every plan that can be started renders in every format; a refused one is one clear error with its reason."""
    plan = planned(box, "gpt-oss-swa")
    if plan.serves:
        assert render(plan, form).strip()
    else:
        with pytest.raises(ConfigError, match="/dev/shm"):
            render(plan, form)


def test_words_that_need_quoting_survive(tmp_path: Path) -> None:
    """Dollar, percent and quotes in a model's path survive every format."""
    import msgspec

    plan = planned("rtx-5090", "qwen3-gqa")
    odd = '/models/a $HOME "b" 100%'
    plan = msgspec.structs.replace(plan, model=odd, command=["vllm", "serve", odd])
    assert shlex.split(render(plan, "args"))[2] == odd
    service = yaml.safe_load(render(plan, "compose"))["services"]["kvtier"]
    assert service["command"][0].replace("$$", "$") == odd
    line = next(line for line in render(plan, "systemd").splitlines() if line.startswith("ExecStart="))
    assert shlex.split(line.removeprefix("ExecStart="))[3].replace("%%", "%").replace("$$", "$") == odd


def test_systemd_escapes_what_it_would_read(tmp_path: Path) -> None:
    """Spaces, quotes, percent and dollar signs reach the service as they are: $ is doubled in commands alone."""
    plan = planned("cpu-only", "llama-dense", nvme="/data/my $kv %n", nvme_gib=4, lmcache_file='/etc/a "b" $c.yaml')
    unit = render(plan, "systemd").splitlines()
    assert 'RequiresMountsFor="/data/my $kv %%n"' in unit
    assert 'Environment="LMCACHE_CONFIG_FILE=/etc/a \\"b\\" $c.yaml"' in unit
    assert 'ExecStartPre=/usr/bin/mkdir -p "/data/my $$kv %%n"' in unit
