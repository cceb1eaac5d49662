"""LoRA adapters and cache_salt become part of every key, whatever the client sends."""

from types import SimpleNamespace

import pytest

from lmcache_nvme_backend.doors.scope import BASE, TAG_FIELD, mark_request, scope_of


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


def test_a_retrained_adapter_at_the_same_path_is_another(tmp_path):
    """The adapter's weights are its identity."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"\1" * 1000)
    before = scope_of(adapter(tmp_path), None)
    weights.write_bytes(b"\2" * 1000)
    assert scope_of(adapter(tmp_path), None) != before


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
