"""The self-test before the first request: a connector that mixes up KV is found out, a right one leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector
from lmcache_nvme_backend.doors.self_test import check_round_trip
from lmcache_nvme_backend.errors import ConfigError

from .conftest import BLOCK, PagedKv, lmcache_metadata


def shifted(slots: torch.Tensor, blocks: int) -> torch.Tensor:
    return slots + blocks * BLOCK


class IgnoresTheBlockTable(CpuBlockConnector):
    """Takes a chunk's blocks to follow each other."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"]
        kwargs["slot_mapping"] = int(slots.min()) + torch.arange(len(slots))
        super().to_gpu(memory_obj, start, end, **kwargs)


class WritesBesideItsBlocks(CpuBlockConnector):
    """Puts one block where another request's lies."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        super().to_gpu(memory_obj, start, end, **kwargs)
        for kv in kwargs["kvcaches"]:
            block = int(kwargs["slot_mapping"][0]) // BLOCK
            kv[block + 1].copy_(kv[block])


class SwapsLayers(CpuBlockConnector):
    """Gives two layers each other's KV."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        first, second, *rest = kwargs["kvcaches"]
        super().to_gpu(memory_obj, start, end, **kwargs | {"kvcaches": [second, first, *rest]})


class ForgetsALayer(CpuBlockConnector):
    """Leaves the last layer as it was."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        last = kwargs["kvcaches"][-1].clone()
        super().to_gpu(memory_obj, start, end, **kwargs)
        kwargs["kvcaches"][-1].copy_(last)


class SwapsPlanes(CpuBlockConnector):
    """Gives keys to values and values to keys, in one token."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        super().to_gpu(memory_obj, start, end, **kwargs)
        kv, block = kwargs["kvcaches"][0], int(kwargs["slot_mapping"][0]) // BLOCK
        row = kv[block].view(torch.uint8)[..., 0, :]
        row.copy_(row.roll(row.shape[-1] // 2, dims=-1))


class Fails(CpuBlockConnector):
    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        raise RuntimeError("no kernel for this layout")


WRONG = [IgnoresTheBlockTable, WritesBesideItsBlocks, SwapsLayers, ForgetsALayer, SwapsPlanes]


@pytest.mark.parametrize("mla", [False, True], ids=["kv", "mla"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_right_connector_passes_and_leaves_no_trace(lmcache, tmp_path, dtype, mla):
    """The pool is as it was, nothing stays on the disk, and every slot is free."""
    metadata = lmcache_metadata(dtype=dtype, mla=mla)
    backend, kv = lmcache(metadata).backend, PagedKv(1024, dtype, mla)
    before = [layer.view(torch.uint8).clone() for layer in kv.layers]
    for num_blocks in (kv.layers[0].shape[0], None):
        check_round_trip(CpuBlockConnector(metadata), backend, kv.layers, num_blocks, BLOCK)
    assert all(torch.equal(old, new.view(torch.uint8)) for old, new in zip(before, kv.layers, strict=True))
    assert list(tmp_path.glob("v1/**/*.kv")) == []
    assert backend.store.stats.hits == 2


def test_layers_that_share_their_kv_pass(lmcache):
    """vLLM names such layers one by one, with one tensor for all of them."""
    metadata = lmcache_metadata()
    first, second, _ = PagedKv(1024).layers
    backend = lmcache(metadata).backend
    check_round_trip(CpuBlockConnector(metadata), backend, [first, second, second], first.shape[0], BLOCK)
    with pytest.raises(ConfigError, match="does not restore"):
        check_round_trip(ForgetsALayer(metadata), backend, [first, second, second], first.shape[0], BLOCK)


@pytest.mark.parametrize("connector", WRONG)
def test_a_connector_that_mixes_up_kv_is_found_out(lmcache, connector):
    """Blocks, layers or planes confused: the error names the connector and the layer, and the pool is as it was."""
    metadata = lmcache_metadata()
    backend, kv = lmcache(metadata).backend, PagedKv(1024)
    before = [layer.view(torch.uint8).clone() for layer in kv.layers]
    with pytest.raises(ConfigError, match=rf"{connector.__name__} does not restore .* in layer \d of 3"):
        check_round_trip(connector(metadata), backend, kv.layers, kv.layers[0].shape[0], BLOCK)
    assert all(torch.equal(old, new.view(torch.uint8)) for old, new in zip(before, kv.layers, strict=True))


def test_planes_apart_and_smaller_kernel_blocks_are_told_apart(lmcache):
    """K and V as the first dimension, and a kernel whose blocks are half of vLLM's: both layouts are read rightly."""

    class TwoPlanes:
        """Between chunks ``[2, layers, tokens, hidden]`` and KV ``[2, blocks, tokens, heads, head size]``, by slots."""

        def batched_from_gpu(self, objs, starts, ends, *, kvcaches, slot_mapping):
            for layer, kv in enumerate(kvcaches):
                objs[0].tensor[:, layer] = kv.reshape(2, -1, kv.shape[-2] * kv.shape[-1])[:, slot_mapping]

        def batched_to_gpu(self, objs, starts, ends, *, kvcaches, slot_mapping, vllm_cached_tokens):
            for layer, kv in enumerate(kvcaches):
                kv.view(2, -1, kv.shape[-2] * kv.shape[-1])[:, slot_mapping] = objs[0].tensor[:, layer]

    backend = lmcache().backend
    kv = [torch.zeros(2, 134, BLOCK // 2, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    check_round_trip(TwoPlanes(), backend, kv, 67, BLOCK)
    with pytest.raises(ConfigError, match="cannot be told apart"):
        check_round_trip(TwoPlanes(), backend, kv, 65, BLOCK)


@pytest.mark.parametrize("connector, why", [(SwapsLayers, "does not restore"), (Fails, "no kernel")])
def test_a_backend_that_failed_it_serves_nothing(lmcache, connector, why):
    """The reason is returned, not raised; once withdrawn, nothing is found, nothing stored, and a metric shows it."""
    one, kv = lmcache(), PagedKv(1024)
    prompt = list(range(1024))
    one.store(prompt, kv)
    one.settle()
    assert one.lookup(prompt) == 1024
    one.engine.lookup_unpin("r")
    cache_config = SimpleNamespace(num_gpu_blocks=kv.layers[0].shape[0], block_size=BLOCK)
    reason = one.backend.self_test(connector(one.backend.metadata), kv.layers, cache_config)
    assert why in str(reason)
    one.backend.withdraw()
    assert one.lookup(prompt) == 0
    one.store(list(range(1, 1025)), kv)
    one.settle()
    assert one.backend._values()["kvtier_degraded"]
    assert sum(one.backend._values()["kvtier_chunks_dropped_total"].values()) == 4


def test_it_can_be_switched_off(lmcache):
    """`nvme.self_test: off` (YAML's false) asks nothing of the connector."""
    backend = lmcache(self_test=False).backend
    assert backend.self_test(None, [], None) is None
