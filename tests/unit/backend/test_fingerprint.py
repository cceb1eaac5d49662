"""The identity of weights: equal for equal ones, different for any tensor changed."""

import json
import shutil
import struct

import pytest

from lmcache_nvme_backend.fingerprint import identify_model, model_fingerprint


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def checkpoint(tmp_path):
    """Two shards of several tensors, with a configuration and an index."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for shard in (1, 2):
        tensors = {f"layer.{shard}.{i}": bytes([shard * 16 + i]) * (100_000 + i) for i in range(4)}
        write_safetensors(directory / f"model-{shard}.safetensors", {"tiny": b"\1\2", **tensors})
    return directory


def test_a_copy_elsewhere_is_the_same_model(checkpoint, tmp_path):
    """The path is not part of the identity."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert model_fingerprint(copy) == model_fingerprint(checkpoint)


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("tensor", range(4))
def test_any_one_tensor_changed_is_another_model(checkpoint, shard, tensor):
    """Same size, same names: only one tensor's values differ."""
    before = model_fingerprint(checkpoint)
    path = checkpoint / f"model-{shard}.safetensors"
    data = path.read_bytes()
    old = bytes([shard * 16 + tensor]) * (100_000 + tensor)
    assert old in data
    path.write_bytes(data.replace(old, bytes([200]) * len(old)))
    assert model_fingerprint(checkpoint) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_changed_configuration_is_another_model(checkpoint, name):
    """The same weights under another rope or scaling compute other KV."""
    before = model_fingerprint(checkpoint)
    (checkpoint / name).write_text('{"hidden_size": 9}')
    assert model_fingerprint(checkpoint) != before


def test_files_that_do_not_compute_are_ignored(checkpoint):
    """A README beside the weights changes nothing."""
    before = model_fingerprint(checkpoint)
    (checkpoint / "README.md").write_text("hello")
    assert model_fingerprint(checkpoint) == before


def test_other_formats_are_sampled_throughout(tmp_path):
    """A GGUF file has no cheap tensor table: a change of a megabyte is seen wherever it is."""
    path = tmp_path / "model.gguf"
    data = bytearray(5 << 20)
    path.write_bytes(data)
    before = model_fingerprint(path)
    data[2 << 20 : 3 << 20] = b"\1" * (1 << 20)
    path.write_bytes(data)
    assert model_fingerprint(path) != before


def test_a_hub_snapshot_is_its_commit(tmp_path, monkeypatch):
    """Snapshots are immutable, so the resolved commit is enough."""
    hub = pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    original = hub.try_to_load_from_cache
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda *a, **k: original(*a, **{**k, "cache_dir": str(tmp_path)})
    )
    assert identify_model("org/name") == f"hub:org/name@{commit}"


def test_a_name_that_leads_nowhere_is_an_error():
    """The caller then asks for nvme.model_fingerprint."""
    with pytest.raises(ValueError, match="neither a path nor"):
        identify_model("no-such-org/no-such-model")


def test_a_broken_weights_header_is_still_an_identity_or_an_error(tmp_path):
    """Never a crash: a file that is not what its suffix says is sampled like any other."""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100_000)
    assert len(model_fingerprint(tmp_path)) == 32
