"""The adapter behind LMCache's own storage manager: stores, lookups, loads, restarts, damage."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from prometheus_client import REGISTRY

from lmcache_nvme_backend.doors.mp.adapter import NvmeL2Adapter
from lmcache_nvme_backend.doors.mp.buffers import Buffer
from lmcache_nvme_backend.errors import ConfigError

from .conftest import MODEL, OBJECT_BYTES, SHAPE, keys, layout, wait_for


def test_objects_come_back_from_disk_after_a_restart(node):
    """What one server stored, the next one on the same root serves, every byte."""
    first = node()
    what = keys(6)
    assert first.fetch(what) == 0
    first.store(what)
    first.close()
    second = node()
    assert second.fetch(what) == 6
    assert second.fetch(keys(6, seed=1)) == 0


def test_a_prefix_whose_head_lmcache_holds_is_loaded_from_the_gap_on(node):
    """LMCache's memory and the disk fill each other's gaps."""
    server = node()
    what = keys(6)
    server.fetch(what)
    server.store(what)
    server.forget()
    assert server.fetch(what[:3]) == 3
    assert server.fetch(what) == 6
    server.forget()
    server.chunks()[1].unlink()
    server.store(what[1:2])
    assert server.fetch(what) == 6


def test_places_in_the_prefix_are_those_that_the_lookup_named(node):
    """The tail goes before the head, over a restart as well: a chunk's file says how deep it stands."""
    server = node()
    what = keys(5)
    server.fetch(what)
    server.store(what)
    assert [int(path.name.split("-")[1], 16) for path in server.chunks()] == [0, 1, 2, 3, 4]


DAMAGE = {
    "removed": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: path.write_bytes(_flipped(path.read_bytes())),
}


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_a_miss_and_is_stored_anew(node, damage):
    """What lies before it is served; it is counted and removed; the next store of it is good."""
    server = node()
    what = keys(6)
    server.fetch(what)
    server.store(what)
    server.forget()
    DAMAGE[damage](server.chunks()[2])
    assert server.fetch(what) == 2
    (space,) = server.adapter.spaces.all()
    assert sum(space.store.stats.corrupt.values()) == (damage != "removed")
    assert sum(space.failed.snapshot().values()) == 1
    server.forget()
    server.store(what[2:3])
    server.forget()
    assert server.fetch(what) == 6


def test_salts_ranks_and_layouts_do_not_share(node):
    """Tenants, the ranks of a model and its layouts have chunks of their own, under the same hashes."""
    server = node()
    server.store(keys(2, salt="tenant"))
    server.store(keys(2, rank=1, world=2))
    server.forget()
    assert server.fetch(keys(2)) == 0
    assert server.fetch(keys(2, salt="other")) == 0
    assert server.fetch(keys(2, rank=0, world=2)) == 0
    assert server.fetch(keys(2, salt="tenant"), layout(torch.float16)) == 0
    assert server.fetch(keys(2, salt="tenant"), layout(shape=(*SHAPE[:3], 64))) == 0
    assert server.fetch(keys(2, salt="tenant")) == 2
    assert server.fetch(keys(2, rank=1, world=2)) == 2


def test_each_model_has_a_namespace(node):
    """Two models in one server, with equal hashes: neither is served the other's KV."""
    server, other = node(), MODEL.replace("ab", "cd")
    server.store(keys(3))
    server.forget()
    assert server.fetch(keys(3, model=other)) == 0
    server.store(keys(3, model=other))
    server.forget()
    assert server.fetch(keys(3)) == server.fetch(keys(3, model=other)) == 3
    assert len(list(server.root.glob("v1/*/namespace.json"))) == 2


def test_keys_without_proof_are_refused(node):
    """A name alone, and a hash that can collide, prove nothing: nothing is stored, nothing served, and it is said."""
    server, unmarked = node(), keys(3, model="models/llama")
    server.store(unmarked)
    server.forget()
    assert server.fetch(unmarked) == 0
    assert server.chunks() == []
    status = server.adapter.report_status()
    assert not status["is_healthy"] and "kvtier.identity" in status["refused"]["models/llama"]
    short = [type(key)(key.chunk_hash[-8:], MODEL, key.kv_rank) for key in keys(2)]
    server.store(short)
    server.forget()
    assert server.fetch(short) == 0
    refused = server.adapter.spaces.unproven.snapshot()
    assert refused["unproven model"] >= 6 and refused["short hash"] >= 4


def test_the_users_word_is_taken_a_model_at_a_time(node):
    """model_fingerprint stands for a mark; another word, or another model, finds nothing."""
    names = ("models/a", "models/b")
    first = node(model_fingerprint="v1")
    first.store(keys(2, model=names[0]))
    first.close()
    second = node(model_fingerprint="v1")
    assert second.fetch(keys(2, model=names[1])) == 0
    assert second.fetch(keys(2, model=names[0])) == 2
    second.close()
    assert node(model_fingerprint="v2").fetch(keys(2, model=names[0])) == 0


def test_by_path_follows_the_weights_and_stops_when_they_change_under_it(node, tmp_path, monkeypatch):
    """Replaced weights are another model after a restart, and no model at all before it."""
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.identity._LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.spaces.RETRY_S", 0.0)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_bytes(b"one" * 1000)
    what = keys(2, model=str(model))
    first = node(unmarked_models="by-path")
    first.store(what)
    first.forget()
    assert first.fetch(what) == 2
    (model / "weights.bin").write_bytes(b"two" * 1000)
    first.forget()
    assert first.fetch(what) == 0
    assert "changed while this server ran" in first.adapter.report_status()["refused"][str(model)]
    first.close()
    second = node(unmarked_models="by-path")
    assert second.fetch(what) == 0
    second.store(what)
    second.forget()
    assert second.fetch(what) == 2


def test_the_quota_is_held_and_usage_follows(node):
    """More is stored than fits: the disk never holds more than the quota, and LMCache's counts by salt follow."""
    server = node(quota_gib=2 / 1024, staging_mib=1)  # 20 objects of 96 KiB and a header
    for seed in range(5):
        what = keys(8, seed=seed, salt="tenant")
        server.fetch(what)
        server.store(what)
        server.forget()
    usage = server.adapter.get_usage()
    assert 0 < usage.total_bytes_used <= usage.total_capacity_bytes == 2 << 20
    assert usage.bytes_by_cache_salt == {"tenant": len(server.chunks()) * OBJECT_BYTES}
    assert 15 <= len(server.chunks()) <= 20
    assert sum(path.stat().st_size for path in server.chunks()) <= 2 << 20


def test_lmcaches_quota_of_a_salt_is_enforced_also_after_a_restart(node):
    """LMCache's own eviction controller removes a tenant's objects; an old one counts from its first use on."""
    evict = {"eviction": {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 1.0}}
    first = node(adapter=evict)
    first.manager.quota_manager.set_quota("kept", 1 << 30)
    first.manager.quota_manager.set_quota("over", 1 << 30)
    for salt in ("kept", "over"):
        first.store(keys(3, salt=salt))
    first.close()
    second = node(adapter=evict)
    for salt in ("kept", "over"):
        second.manager.quota_manager.set_quota(salt, 1 << 30)
        assert second.fetch(keys(3, salt=salt)) == 3
    assert second.adapter.get_usage().bytes_by_cache_salt == dict.fromkeys(("kept", "over"), 3 * OBJECT_BYTES)
    second.manager.quota_manager.set_quota("over", 1000)
    wait_for(lambda: "over" not in second.adapter.get_usage().bytes_by_cache_salt)
    second.forget()
    assert second.fetch(keys(3, salt="over")) == 0
    assert second.fetch(keys(3, salt="kept")) == 3


def test_a_model_that_is_closed_is_counted_no_more(node, monkeypatch):
    """Nothing of it can be deleted, so LMCache's quota must not wait for it; asked for again, it counts again."""
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.spaces.IDLE_S", 0.0)
    server, other = node(), MODEL.replace("ab", "cd")
    server.store(keys(3, salt="first"))
    server.store(keys(2, salt="second", model=other))
    assert server.adapter.get_usage().bytes_by_cache_salt == {"second": 2 * OBJECT_BYTES}
    assert len(server.adapter.residents._known) == 2
    server.forget()
    assert server.fetch(keys(3, salt="first")) == 3
    assert server.adapter.get_usage().bytes_by_cache_salt == {"first": 3 * OBJECT_BYTES}


def test_evicted_objects_are_forgotten_also_where_nobody_asks_for_usage(node, monkeypatch):
    """A server that runs for months knows no more objects than the quota holds, twice."""
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.residents.LOOK_AFTER", 8)
    server = node(quota_gib=2 / 1024, staging_mib=1)
    for seed in range(12):
        server.store(keys(8, seed=seed))
    assert len(server.adapter.residents._known) <= 2 * 20 + 8


def test_what_a_lookup_has_locked_stays(node):
    """Neither LMCache's deletion nor the store's own eviction takes what a request was promised."""
    server = node(quota_gib=2 / 1024, staging_mib=1)
    what = keys(4)
    server.fetch(what)
    server.store(what)
    task = server.adapter.submit_lookup_and_lock_task(what, {0: layout()})
    wait_for(lambda: server.adapter._lookup_board._results.get(task) is not None)
    assert server.adapter.query_lookup_and_lock_result(task).popcount() == 4
    server.adapter.delete(what)
    for seed in range(1, 6):
        server.store(keys(8, seed=seed))
    server.forget()
    assert server.fetch(what) == 4
    server.adapter.submit_unlock(what)
    server.adapter.delete(what)
    server.forget()
    assert server.fetch(what) == 0


def test_a_lock_that_is_never_given_back_ends(node, monkeypatch):
    """LMCache forgets the locks of a request that it aborts in its lookup: what they held can be deleted again."""
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.spaces.PIN_LIFETIME_S", 0.2)
    server = node()
    what = keys(2)
    server.fetch(what)
    server.store(what)
    task = server.adapter.submit_lookup_and_lock_task(what, {0: layout()})
    wait_for(lambda: server.adapter.query_lookup_and_lock_result(task) is not None)

    def deleted() -> bool:
        server.adapter.delete(what)
        return not server.chunks()

    wait_for(deleted, 3)
    assert server.adapter._locks == {}


def test_two_servers_share_one_root(node):
    """What one stores, the other serves without being told; what one removes is a miss for the other."""
    first, second = node(), node()
    what = keys(4)
    assert second.fetch(what) == 0
    first.store(what)
    assert second.fetch(what) == 4
    second.forget()
    first.forget()
    first.adapter.delete(what)
    assert second.fetch(what) == 0


def test_a_root_that_goes_away_costs_its_chunks_and_nothing_else(node):
    """The directory is deleted under the running server: misses, no error into LMCache, and it stores again."""
    server = node()
    what = keys(4)
    server.store(what)
    server.forget()
    shutil.rmtree(server.root / "v1")
    assert server.fetch(what) == 0

    def stored_again() -> bool:
        server.forget()
        server.store(what)
        server.forget()
        return server.fetch(what) == 4

    wait_for(stored_again)


def test_a_task_that_comes_while_it_closes_has_a_result(tmp_path):
    """A miss, or a store that failed; nothing is left that a controller would wait for."""
    adapter = NvmeL2Adapter({"root_dir": str(tmp_path), "quota_gib": 1})
    what, objects = keys(2), [Buffer(OBJECT_BYTES).obj for _ in range(2)]
    adapter._closed = True
    task = adapter.submit_lookup_and_lock_task(what, {0: layout()})
    assert adapter.query_lookup_and_lock_result(task).popcount() == 0
    task = adapter.submit_load_task(what, objects)
    assert adapter.query_load_result(task).popcount() == 0
    task = adapter.submit_store_task(what, objects)
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    adapter.close()
    adapter.close()


def test_memory_whose_lock_may_have_ended_is_left_alone(node, monkeypatch):
    """On a disk so slow that LMCache's own locks end, nothing is stored, and nothing is written into L1."""
    server = node()
    what = keys(3)
    server.store(what)
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.objects.LENT_S", -1.0)
    late = keys(2, seed=1)
    server.store(late)
    assert server.count("too late") == 2
    server.forget()
    assert server.fetch(what) == 0
    monkeypatch.undo()
    assert server.fetch(late) == 0
    assert server.fetch(what) == 3
    assert len(server.chunks()) == 3


def test_serialized_objects_are_refused(node):
    """What LMCache's serde makes of KV has no layout that a lookup could know: it is not stored."""
    server = node(adapter={"serde": {"type": "fp8"}})
    server.store(keys(2))
    assert server.chunks() == []
    assert server.adapter.inner_adapter.spaces.unproven.snapshot()["serialized"] == 2


def test_the_numbers_are_on_the_servers_own_metrics(node):
    """The registry that LMCache's server serves has them, by root and model, and loses them at the end."""
    server = node()
    what = keys(3)
    server.fetch(what)
    server.store(what)
    server.forget()
    server.fetch(what)
    labels = {"root": str(server.root), "model": "models/llama"}
    assert REGISTRY.get_sample_value("kvtier_chunks_stored_total", labels) == 3
    assert REGISTRY.get_sample_value("kvtier_chunks_loaded_total", labels) == 3
    assert REGISTRY.get_sample_value("kvtier_chunks_hit_total", labels) == 3
    assert REGISTRY.get_sample_value("kvtier_chunks_missed_total", labels) == 3
    assert REGISTRY.get_sample_value("kvtier_degraded", {"root": str(server.root)}) == 0
    server.adapter.spaces.all()[0].store._breaker.open = True
    for name in ("kvtier_breaker_open", "kvtier_degraded"):
        assert REGISTRY.get_sample_value(name, {"root": str(server.root)}) == 1
    server.close()
    assert REGISTRY.get_sample_value("kvtier_chunks_stored_total", labels) is None


def test_a_wrong_setting_ends_the_servers_start(node, tmp_path):
    """The server does not start, and the error names the setting as it was written; degrade serves nothing, loudly."""
    with pytest.raises(ConfigError, match="root_dir"):
        node(tmp_path / "root", root_dir="relative/path")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="root_dir"):
        node(root_dir=str(file))
    server = node(root_dir=str(file), on_init_error="degrade")
    server.store(keys(2))
    server.forget()
    assert server.fetch(keys(2)) == 0
    assert REGISTRY.get_sample_value("kvtier_degraded", {"root": str(file)}) == 1
