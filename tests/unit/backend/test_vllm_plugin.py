"""vLLM's entry point: cheap, quiet unless it is meant, and an error in the front process ends the start there."""

import json
import subprocess
import sys

import pytest
import yaml

from lmcache_nvme_backend.doors import vllm_plugin
from lmcache_nvme_backend.errors import ConfigError

ENTRY = {"storage_plugin.nvme.module_path": "lmcache_nvme_backend", "storage_plugin.nvme.class_name": "NvmeBackend"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_EXTRA_CONFIG", "LMCACHE_STORAGE_PLUGINS", "LMCACHE_USE_LAYERWISE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["vllm"])


def write(tmp_path, monkeypatch, top=None, **nvme):
    extra = ENTRY | {"nvme.path": str(tmp_path), "nvme.quota_gib": 1} | {f"nvme.{k}": v for k, v in nvme.items()}
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump({"storage_plugins": ["nvme"], "extra_config": extra, **(top or {})}))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))


def test_importing_and_arming_it_imports_neither_torch_nor_lmcache():
    """vLLM runs it in every process before anything else; LMCache imported this early breaks the worker."""
    code = (
        "import sys; from lmcache_nvme_backend.doors import vllm_plugin; vllm_plugin.register();"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'lmcache', 'vllm', 'yaml')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_another_configuration_is_none_of_its_business(tmp_path, monkeypatch):
    """No LMCache, or an LMCache without this backend."""
    assert vllm_plugin.configured() is None
    path = tmp_path / "other.yaml"
    path.write_text("local_cpu: true\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    assert vllm_plugin.configured() is None


def test_a_file_names_it(tmp_path, monkeypatch):
    """The documented way."""
    write(tmp_path, monkeypatch)
    vllm_plugin.check_front(vllm_plugin.configured())


def test_variables_name_it(tmp_path, monkeypatch):
    """LMCACHE_* variables alone, as in a container."""
    monkeypatch.setenv("LMCACHE_STORAGE_PLUGINS", "nvme")
    monkeypatch.setenv("LMCACHE_EXTRA_CONFIG", json.dumps(ENTRY | {"nvme.path": str(tmp_path), "nvme.quota_gib": 1}))
    vllm_plugin.check_front(vllm_plugin.configured())


@pytest.mark.parametrize("joined", [True, False])
def test_the_connectors_extra_config_names_it(tmp_path, monkeypatch, joined):
    """`lmcache.*` fields of --kv-transfer-config are LMCache's third source."""
    fields = {"lmcache.storage_plugins": ["nvme"]}
    fields["lmcache.extra_config"] = ENTRY | {"nvme.path": str(tmp_path), "nvme.quota_gib": 1}
    text = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": fields})
    argument = [f"--kv-transfer-config={text}"] if joined else ["--kv-transfer-config", text]
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *argument])
    vllm_plugin.check_front(vllm_plugin.configured())


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({"quota_gb": 1}, "nvme.quota_gb"),
        ({"path": "relative"}, "nvme.path"),
        ({"path": "/no/such/place"}, "nvme.path"),
        ({"quota_gib": 0.01}, "nvme.quota_gib"),
        ({"top": {"use_layerwise": True}}, "use_layerwise"),
        ({"top": {"local_disk": "/x", "max_local_cpu_size": 0}}, "local_disk"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_work_is_known_in_the_front(tmp_path, monkeypatch, changes, setting):
    """No engine is needed to know it."""
    write(tmp_path, monkeypatch, **changes)
    with pytest.raises(ConfigError) as caught:
        vllm_plugin.check_front(vllm_plugin.configured())
    assert caught.value.setting == setting


@pytest.mark.parametrize("text", ["{", "- a\n- b: [", "just text"])
def test_a_broken_file_is_an_error_or_no_configuration(tmp_path, monkeypatch, text):
    """Never a traceback from a YAML parser."""
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    try:
        assert vllm_plugin.configured() is None
    except ConfigError as e:
        assert e.setting == "LMCACHE_CONFIG_FILE"


def test_a_refused_start_prints_its_reason_last_and_ends_non_zero(tmp_path, monkeypatch):
    """As vLLM's front process would run it."""
    write(tmp_path, monkeypatch, path="relative")
    code = "from lmcache_nvme_backend.doors import vllm_plugin; vllm_plugin.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("lmcache_nvme_backend: the start was refused: nvme.path:")


def test_degrade_leaves_the_decision_to_the_worker(tmp_path, monkeypatch):
    """It serves without the tier, says so and shows it: that is the worker's part."""
    write(tmp_path, monkeypatch, path="relative", on_init_error="degrade")
    code = "from lmcache_nvme_backend.doors import vllm_plugin; vllm_plugin.register(); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "goes on" in done.stdout
