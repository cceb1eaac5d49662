import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from kvtier.demo_doors import lmcache_config
from kvtier.document import QUESTION, lighthouse_log
from kvtier.examples import example
from lmcache_nvme_backend.settings import parse_settings


def kvtier(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli", *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_importing_the_command_line_is_light():
    """`kvtier --help` must not wait for torch, vLLM or LMCache."""
    code = (
        "import sys, kvtier.cli; print([m for m in ('torch', 'vllm', 'lmcache', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("demo", "--model", "/nowhere"), "--model"),
        (("demo", "--model", "random", "--prompt", "/nowhere"), "--prompt"),
        (("demo", "--nonsense"), "--nonsense"),
    ],
)
def test_what_a_person_can_put_right_is_one_message(arguments, word, tmp_path):
    """Exit status 2 and a message that names the option, without a traceback."""
    done = kvtier(*arguments, KVTIER_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert word in done.stderr and "Traceback" not in done.stderr


def test_the_demo_changes_only_folder_and_quota_of_the_example(tmp_path):
    """What the demo shows is what the documented configuration does."""
    shipped, used = yaml.safe_load(example("lmcache-nvme.yaml").read_text()), lmcache_config(tmp_path, 2)
    assert used["extra_config"].pop("nvme.path") == str(tmp_path)
    assert used["extra_config"].pop("nvme.quota_gib") == 2
    del shipped["extra_config"]["nvme.path"], shipped["extra_config"]["nvme.quota_gib"]
    assert used == shipped


def test_the_example_is_a_valid_configuration_without_a_cpu_pool():
    """The file a person copies is accepted as it stands."""
    config = yaml.safe_load(example("lmcache-nvme.yaml").read_text())
    assert (config["local_cpu"], config["max_local_cpu_size"], config["chunk_size"]) == (False, 0, 256)
    assert parse_settings(config["extra_config"]).path == "/mnt/kv-cache"
    assert Path(example("lmcache-nvme.yaml")).parent.name == "examples"


def test_the_document_is_the_same_everywhere():
    """Chunks are found by the text's hash, so a run tomorrow must send the same bytes."""
    digest = sha256((lighthouse_log(44) + QUESTION).encode()).hexdigest()
    assert digest == "a39176751dee06f37cb0dcfe5a99ab451a2d0da43ffc3d6225039d4dee22f424"
