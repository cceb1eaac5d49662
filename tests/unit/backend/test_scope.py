"""LoRA adapters and cache_salt become part of every key, whatever the client sends."""

from types import SimpleNamespace

import pytest

from lmcache_nvme_backend.doors.scope import BASE, TAG_FIELD, _Adapters, mark_request, scope_of


def request(salt=None, lora=None, extra_args=None):
    params = SimpleNamespace(extra_args=extra_args)
    return SimpleNamespace(sampling_params=params, cache_salt=salt, lora_request=lora)


def mark_of(r):
    mark_request(r)
    return r.sampling_params.extra_args["kv_transfer_params"][TAG_FIELD]


def adapter(path, name="a"):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_every_request_is_marked():
    """The backend tells an unmarked scheduler from a request with neither adapter nor salt."""
    assert mark_of(request()) == BASE


def test_salts_are_apart_and_not_readable():
    """A salt is a secret: its digest goes into the key."""
    one, two = mark_of(request(salt="one")), mark_of(request(salt="two"))
    assert len({one, two, BASE}) == 3
    assert "one" not in one.removeprefix("salt:")


def test_adapters_are_apart_and_from_salts_too(tmp_path):
    """Two adapters, the base model, and each with a salt are five keys."""
    marks = {
        mark_of(request(lora=lora, salt=salt))
        for lora in (None, adapter(tmp_path / "x", "x"), adapter(tmp_path / "y", "y"))
        for salt in (None, "s")
    }
    assert len(marks) == 6


def test_an_adapter_is_what_the_engine_loaded_not_what_lies_there_later(tmp_path):
    """vLLM reads the files once. Retrained under a running engine: never found again, by the old or the new weights."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"\1" * 1000)
    loaded = scope_of(adapter(tmp_path), None)
    assert scope_of(adapter(tmp_path), None) == loaded == scope_of(adapter(tmp_path, name="other name"), None)
    weights.write_bytes(b"\2" * 1000)
    confused = scope_of(adapter(tmp_path), None)
    assert confused != loaded
    fresh_process = _Adapters().identity(adapter(tmp_path))
    assert f"lora:{fresh_process}" not in (loaded, confused)


def test_an_adapter_that_cannot_be_read_is_known_to_this_process_alone(tmp_path):
    """A name that leads nowhere may mean other weights tomorrow."""
    nowhere = adapter("org/no-such-adapter")
    assert scope_of(nowhere, None) == scope_of(nowhere, None)
    assert _Adapters().identity(nowhere) != _Adapters().identity(nowhere)


def test_home_directories_are_found(tmp_path, monkeypatch):
    """vLLM expands `~`, so the adapter behind it has weights to be known by."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"\1" * 1000)
    assert _Adapters().identity(adapter("~/a")) == _Adapters().identity(adapter(tmp_path / "a"))


def test_a_client_cannot_choose_its_mark():
    """Our tag is overwritten; other transfer parameters stay."""
    sent = {"kv_transfer_params": {TAG_FIELD: "salt:stolen", "lmcache.tag.mine": "1"}, "other": 2}
    r = request(extra_args=sent)
    assert mark_of(r) == BASE
    assert r.sampling_params.extra_args["kv_transfer_params"]["lmcache.tag.mine"] == "1"
    assert r.sampling_params.extra_args["other"] == 2


def test_shared_parameters_are_not_changed():
    """One SamplingParams object may serve many requests with different adapters."""
    shared = SimpleNamespace(extra_args=None)
    first = SimpleNamespace(sampling_params=shared, cache_salt="a", lora_request=None)
    second = SimpleNamespace(sampling_params=shared, cache_salt="b", lora_request=None)
    mark_request(first)
    mark_request(second)
    assert shared.extra_args is None
    assert mark_of(first) != mark_of(second)


@pytest.mark.parametrize("kv_params", [None, "text", 3, []])
def test_strange_transfer_parameters_are_survived(kv_params):
    """Nothing a client sends may raise in the scheduler."""
    assert mark_of(request(extra_args={"kv_transfer_params": kv_params})) == BASE


def test_a_pooling_request_without_parameters_is_left_alone():
    """No sampling parameters, nothing to mark."""
    mark_request(SimpleNamespace(sampling_params=None))
