"""`NvmeTier` behind vLLM's real scheduler, KV cache manager, connector and tiering manager: every block that a step
computes on is checked byte by byte (see `tests.integration.native.room`, which stands in for the model)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

import lmcache_nvme_backend
from lmcache_nvme_backend.doors import packing, scope
from tests.integration.native.room import Room, chunk_files, damage, prompt
from tests.integration.tier.world import entry

TOKENS, BLOCK = 1000, 16  # of which 992 are whole blocks
WHOLE = 992
# The room takes its connector from this package, and counts a load's chunks by what the native door calls them.
lmcache_nvme_backend.OffloadingConnector = OffloadingConnector  # type: ignore[attr-defined]
CPULoadStoreSpec.keys = property(lambda self: self.block_ids)


class TierRoom(Room):
    """With vLLM's tiering in place of the native door, on a CPU."""

    def __init__(
        self, root: Path, *, hybrid: bool = False, host_rows: int = 200, per_chunk: int = 1, **settings: Any
    ) -> None:
        row = per_chunk * (8 << 10 if hybrid else 4 * 8 << 10)
        super().__init__(
            root, hybrid=hybrid, connector="OffloadingConnector", spec_name="CpuTieringOffloadingSpec",
            cpu_bytes_to_use=host_rows * row, blocks_per_chunk=per_chunk,
            secondary_tiers=[entry(root, **{"quota_gib": 0.05, "model_fingerprint": "room", **settings})],
        )  # fmt: skip

    @property
    def nvme(self) -> Any:
        [tier] = self.manager.secondary_tiers
        return tier

    def settle(self) -> None:
        """Until what was stored is on disk."""
        deadline = time.monotonic() + 60
        while self.manager.has_pending_work():
            self.step()
            assert time.monotonic() < deadline

    def empty(self) -> None:
        """Nothing in the pool and nothing in the host buffer."""
        self.settle()
        self.forget()
        self.manager.reset_cache()

    def kill(self) -> None:
        """The process is gone: what a shutdown would have written is not."""
        self.settle()
        self.close()


Make = Callable[..., TierRoom]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Make]:
    made: list[TierRoom] = []

    def make(**settings: Any) -> TierRoom:
        made.append(TierRoom(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("hybrid", [False, True], ids=["full", "hybrid"])
def test_a_prompt_comes_back_once_pool_and_host_have_lost_it_and_after_a_restart(room: Make, hybrid: bool) -> None:
    """Attention and states alike, and every block holds what it must."""
    first = room(hybrid=hybrid)
    served = [first.serve("cold", prompt(TOKENS))]
    for name in ("second", "third"):
        first.empty()
        served.append(first.serve(name, prompt(TOKENS)))
    first.settle()
    first.close()
    second = room(hybrid=hybrid)
    served.append(second.serve("restarted", prompt(TOKENS)))
    assert served == [0, WHOLE, WHOLE, WHOLE]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_damaged_chunk_of_any_group_costs_a_recompute(room: Make, tmp_path: Path, rank: int) -> None:
    """The engine lives, what is computed is right, and it is stored anew."""
    one = room(hybrid=True)
    one.serve("cold", prompt(TOKENS))
    one.empty()
    files = [f for f in chunk_files(tmp_path) if int(f.name.split("-")[1], 16) % len(one.groups) == rank]
    damage(files[-1])
    before = one.serve("asked", prompt(TOKENS))
    assert before < WHOLE and one.nvme.store.stats.corrupt
    assert sum(one.nvme.transfers.load_failures.snapshot().values()) == 1
    one.empty()
    assert one.serve("again", prompt(TOKENS)) == WHOLE


@pytest.mark.parametrize("hybrid", [False, True], ids=["full", "hybrid"])
def test_every_block_is_right_in_a_store_that_is_too_small(room: Make, tmp_path: Path, hybrid: bool) -> None:
    """Prompts with shared beginnings, far more than the quota holds, in a host buffer that is too small as well."""
    one = room(hybrid=hybrid, host_rows=80, quota_gib=0.002 if hybrid else 0.006)
    served = 0
    for number in range(14):
        one.serve(f"new {number}", prompt(400, seed=number % 3) + prompt(300, seed=50 + number))
        one.empty()
        before = max(0, number - 1)
        served += one.serve(f"old {number}", prompt(400, seed=before % 3) + prompt(300, seed=50 + before)) > 600
    one.settle()
    # How many of fourteen are still whole depends on what the order of eviction has learned within these seconds.
    assert served >= 4 and one.nvme.store.stats.evictions > 50
    assert sum(f.stat().st_size for f in chunk_files(tmp_path)) <= one.nvme.settings.quota_bytes


def test_salts_keep_tenants_apart(room: Make) -> None:
    """vLLM's hash of the first block has the salt, and so have all that follow."""
    one = room()
    one.serve("cold", prompt(TOKENS), cache_salt="red")
    one.empty()
    assert one.serve("other", prompt(TOKENS), cache_salt="blue") == 0
    assert one.serve("none", prompt(TOKENS)) == 0
    one.empty()
    assert one.serve("same", prompt(TOKENS), cache_salt="red") == WHOLE


def test_an_adapters_weights_are_part_of_the_key(room: Make, tmp_path: Path) -> None:
    """Its name and path are vLLM's part; what lies there after a restart is this tier's."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path.parent / f"{tmp_path.name}-adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "adapter_model.bin"
    weights.write_bytes(b"1" * 5000)
    lora = LoRARequest("red", 1, str(folder))
    first = room()
    first.serve("cold", prompt(TOKENS), lora_request=lora)
    first.empty()
    assert first.serve("plain", prompt(TOKENS)) == 0
    assert first.serve("same", prompt(TOKENS), lora_request=lora) == WHOLE
    first.settle()
    first.close()
    for content, expected in ((b"2", 0), (b"1", WHOLE)):
        scope._adapters = scope._Adapters()  # a new process
        weights.write_bytes(content * 5000)
        again = room()
        assert again.serve("restarted", prompt(TOKENS), lora_request=lora) == expected
        again.settle()
        again.close()


def test_the_namespace_says_what_the_engine_is(room: Make) -> None:
    """The tier has vLLM's configuration, though vLLM passes it none."""
    facts = room(hybrid=True).nvme.store.namespace.facts
    assert facts["engine"] == "vllm" and facts["model"] == "given:room" and facts["hash"] == "sha256"
    kinds = [group[4] for group in facts["groups"]]
    assert sorted(kinds) == ["FullAttentionSpec", "MambaSpec", "MambaSpec", "MambaSpec"]
    assert [group[2] for group in facts["groups"] if group[4] == "MambaSpec"] == [1, 1, 1]


def test_how_the_device_packs_a_block_makes_another_namespace(room: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are copied as they are: a root that is carried to another processor serves nothing of this one's."""
    digests = set()
    for isa in ("amx", "vec"):
        monkeypatch.setattr(packing, "block_packing", lambda config, isa=isa: isa)
        one = room()
        digests.add(one.nvme.store.namespace.digest)
    assert len(digests) == 2


def test_a_second_sight_admission_is_refused_for_a_hybrid_model(room: Make) -> None:
    """The order of its chunks remembers nothing of what has gone, so nothing would ever be stored."""
    with pytest.raises(ValueError, match="admission: found second-sight"):
        room(hybrid=True, admission="second-sight")


@pytest.mark.parametrize(("hybrid", "per_chunk", "warned"), [(True, 4, True), (True, 1, False), (False, 4, False)])
def test_chunks_in_which_a_state_is_hardly_ever_whole_are_warned_of(
    room: Make, caplog: pytest.LogCaptureFixture, hybrid: bool, per_chunk: int, warned: bool
) -> None:
    """vLLM keeps a hybrid's states at few places; where nothing is found again for that, the log has said so."""
    one = room(hybrid=hybrid, per_chunk=per_chunk)
    one.serve("cold", prompt(TOKENS))
    one.empty()
    assert (one.serve("again", prompt(TOKENS)) == 0) is warned
    assert ("the model keeps states" in caplog.text) is warned
