"""Two hosts, LMCache's own storage manager each, with their own NVMe directories over one real Redis server.

The same with two servers in processes of their own, and engines: `tests/engine/test_lmcache_server.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.mp_observability.event import EventType
from lmcache.v1.platform import create_event_notifier
from prometheus_client import REGISTRY

from lmcache_nvme_backend.doors.mp.remote import Remote, parse_remote
from lmcache_nvme_backend.errors import ConfigError

from .conftest import MODEL, keys, layout, wait_for
from .redis_server import Redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def hosts(node, redis, tmp_path):
    """A factory of hosts: each has a root of its own, and all the same Redis behind."""

    def make(name: str, up: bool = True, **params):
        behind = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
        host = node(tmp_path / name, behind=behind, **params)
        assert not up or host.adapter.behind.remote.wait_up(30)
        return host

    return make


def counted(host, what: str) -> int:
    return host.adapter.behind.counts.snapshot().get(what, 0)


def shared(host, count: int) -> None:
    """Wait until the store behind has taken so many chunks of this host."""
    wait_for(lambda: counted(host, "stored") >= count)


def kept(host, count: int) -> None:
    """Wait until so many chunks from behind lie in this host's own store."""
    wait_for(lambda: counted(host, "kept") >= count)


def test_what_one_host_stored_the_other_serves_and_keeps(hosts, redis):
    """The second host has every byte of it, from Redis first, and from its own disk once Redis is gone, restart
    included."""
    first, second = hosts("a"), hosts("b")
    what = keys(6)
    first.store(what)
    shared(first, 6)
    assert second.fetch(what) == 6
    assert counted(second, "hit") == counted(second, "loaded") == 6
    kept(second, 6)
    redis.stop()
    second.forget()
    assert second.fetch(what) == 6
    assert counted(second, "loaded") == 6
    second.close()
    assert hosts("b", up=False).fetch(what) == 6


def test_a_longer_prefix_comes_from_both(hosts):
    """A host that has the head loads the rest from behind; tenants and models stay apart there as well."""
    first, second = hosts("a"), hosts("b")
    what = keys(6)
    second.fetch(what[:2])
    second.store(what[:2])
    first.store(what)
    shared(first, 6)
    second.forget()
    assert second.fetch(what) == 6
    assert counted(second, "loaded") == 4
    assert second.fetch(keys(6, salt="tenant")) == 0
    assert second.fetch(keys(6, model=MODEL.replace("ab", "cd"))) == 0


def test_a_chunk_that_is_damaged_here_is_healed_from_behind(hosts):
    """The file is removed, the bytes come from the other store, and lie here again afterwards."""
    host = hosts("a")
    what = keys(4)
    host.fetch(what)
    host.store(what)
    shared(host, 4)
    host.forget()
    path = host.chunks()[1]
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert host.fetch(what) == 4
    kept(host, 1)
    assert len(host.chunks()) == 4


def test_bytes_from_behind_are_believed_only_with_their_seal(hosts, redis):
    """A value that was overwritten, and one that belongs to another chunk, are misses, and are counted."""
    first, second = hosts("a"), hosts("b")
    what = keys(4)
    first.store(what)
    shared(first, 4)
    names = {bytes.fromhex(name.split("@")[3])[:16]: name for name in redis.names("kvtier-*@*") if "probe" not in name}
    third, fourth = (names[first.adapter.residents.chunk(key).name] for key in what[2:])
    assert redis.ask("COPY", third, fourth, "REPLACE").strip() == ":1"
    assert second.fetch(what) == 3
    assert counted(second, "corrupt") == 1
    kept(second, 3)
    assert redis.ask("SETRANGE", third, "5000", "XXXX").startswith(":")
    second.forget()
    assert second.fetch(what) == 3  # its own copy is whole
    third_host = hosts("c")
    assert third_host.fetch(what) == 2
    assert counted(third_host, "corrupt") == 2


def test_a_store_behind_that_goes_away_and_returns(hosts, redis):
    """While it is gone nothing waits for it and nothing fails, and it is said; when it is back it is used again."""
    host = hosts("a")
    host.store(keys(2))
    shared(host, 2)
    redis.stop()
    remote = host.adapter.behind.remote
    host.store(keys(2, seed=1))
    wait_for(lambda: not remote.up)
    began = time.monotonic()
    host.forget()
    assert host.fetch(keys(2, seed=1)) == 2
    assert host.fetch(keys(2, seed=2)) == 0
    assert time.monotonic() - began < host.adapter.settings.behind_timeout_s + 5
    status = host.adapter.report_status()
    assert status["behind"] == {"type": "resp", "up": False} and status["is_healthy"]
    assert REGISTRY.get_sample_value("kvtier_behind_up", {"root": str(host.root)}) == 0
    redis.start()
    wait_for(lambda: remote.up, 40)
    host.store(keys(2, seed=3))
    shared(host, 4)


def test_a_store_behind_that_hangs_costs_one_bounded_wait(hosts, redis):
    """The first lookup waits its bound and no longer; the next ones do not ask at all. Late answers touch nothing."""
    first = hosts("a")
    what = keys(4)
    first.store(what)
    shared(first, 4)
    second = hosts("b", behind_timeout_s=0.5)
    redis.process.send_signal(signal.SIGSTOP)
    assert second.fetch(what) == 0
    assert not second.adapter.behind.remote.up
    asked = []
    second.adapter.behind.remote.lookup = lambda keys: asked.append(keys)
    assert second.fetch(keys(4, seed=1)) == 0
    assert second.adapter.behind.buffers.in_use == 0
    redis.process.send_signal(signal.SIGCONT)
    del second.adapter.behind.remote.lookup
    wait_for(lambda: second.adapter.behind.remote.up, 40)
    assert second.fetch(what) == 4


def test_a_store_behind_that_takes_nothing_in_holds_up_no_store_here(hosts, redis):
    """A batch waits once for the memory of copies, not once a chunk: LMCache's memory waits with it."""
    host = hosts("a", staging_mib=1)  # 10 objects
    redis.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    host.store(keys(16))
    assert time.monotonic() - began < 4
    assert host.adapter.behind.dropped.snapshot()["staging full"] == 6
    host.forget()
    assert host.fetch(keys(16)) == 16
    redis.process.send_signal(signal.SIGCONT)


class Refuses:
    """A store behind that answers every store at once, and keeps nothing."""

    made = 0

    def __init__(self) -> None:
        Refuses.made += 1
        self.asked = 0
        self._events = [create_event_notifier() for _ in range(3)]
        self._tasks: list[int] = []
        self.get_store_event_fd, self.get_lookup_and_lock_event_fd, self.get_load_event_fd = (
            event.fileno for event in self._events
        )

    def submit_store_task(self, keys, objects) -> int:
        self.asked += 1
        self._tasks.append(self.asked)
        self._events[0].notify()
        return self.asked

    def pop_completed_store_tasks(self):
        tasks, self._tasks = self._tasks, []
        return {task: L2StoreResult(False, 0) for task in tasks}

    def close(self) -> None:
        for event in self._events:
            event.close()


def test_a_store_behind_that_fails_at_once_is_probed_no_faster_than_one_that_hangs(monkeypatch):
    """Also while it is suspected; else each failure would be followed by the next probe, and by new clients."""
    monkeypatch.setattr("lmcache_nvme_backend.doors.mp.remote.create_l2_adapter", lambda config: Refuses())
    remote = Remote(None, "refuses")
    wait_for(lambda: Refuses.made)
    remote.suspect("a store failed")
    time.sleep(3)
    assert Refuses.made <= 2
    remote.close()


def test_a_copy_that_changes_while_it_is_written_here_is_not_kept(node, tmp_path, monkeypatch):
    """A client that was given up may still have its address; what was served had been verified where it was served."""
    behind = {"type": "fs", "base_path": str(tmp_path / "shared")}
    first, second = (node(tmp_path / name, behind=behind) for name in "ab")
    assert all(host.adapter.behind.remote.wait_up(30) for host in (first, second))
    first.store(keys(1))
    shared(first, 1)
    assert second.fetch(keys(1, seed=1)) == 0
    (space,) = second.adapter.spaces.all()
    put = space.store.put

    def disturbed(name, payload, **place):
        payload[100] ^= 1
        return put(name, payload, **place)

    monkeypatch.setattr(space.store, "put", disturbed)
    assert second.fetch(keys(1)) == 1
    wait_for(lambda: second.adapter.behind.buffers.in_use == 0)
    assert second.chunks() == [] and counted(second, "kept") == 0


def test_a_chunk_larger_than_the_copies_may_be_stays_here(hosts):
    """staging_mib is the bound on host memory: what does not fit is not shared, is counted, and is stored here."""
    host = hosts("a", staging_mib=1)
    large = layout(shape=(2, 48, 256, 32))  # 1.5 MiB
    host.store(keys(2), large)
    assert host.adapter.behind.dropped.snapshot() == {"staging full": 2}
    host.forget()
    assert host.fetch(keys(2), large) == 2
    assert counted(host, "stored") == 0


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_a_shared_file_system_behind(node, tmp_path, kind):
    """Any of LMCache's adapters can stand behind: its fs adapters on a directory that both hosts mount."""
    (tmp_path / "shared").mkdir()
    behind = {"type": kind, "base_path": str(tmp_path / "shared")}
    first, second = (node(tmp_path / name, behind=behind) for name in "ab")
    assert all(host.adapter.behind.remote.wait_up(30) for host in (first, second))
    first.store(keys(3))
    shared(first, 3)
    assert second.fetch(keys(3)) == 3


def test_lmcache_is_told_of_what_lies_here_and_not_of_what_lies_behind(node, tmp_path, monkeypatch):
    """Its coordinator counts an object once, under the name that requests know."""
    told: list[Any] = []
    monkeypatch.setattr(
        "lmcache.v1.distributed.l2_adapters.base.get_event_bus", lambda: SimpleNamespace(publish=told.append)
    )
    host = node(tmp_path / "a", behind={"type": "fs", "base_path": str(tmp_path / "shared")})
    assert host.adapter.behind.remote.wait_up(30)
    host.store(keys(3))
    shared(host, 3)
    stored = [event.metadata for event in told if event.event_type is EventType.L2_KEYS_STORED]
    assert [key for event in stored for key in event["keys"]] == keys(3)
    assert {event["backend"] for event in stored} == {"plugin"}


def test_a_request_that_found_a_chunk_behind_unlocks_no_other_requests_chunk(node, tmp_path):
    """The first request has nothing locked here; the second one found here what the first had brought."""
    behind = {"type": "fs", "base_path": str(tmp_path / "shared")}
    first, second = (node(tmp_path / name, behind=behind) for name in "ab")
    assert all(host.adapter.behind.remote.wait_up(30) for host in (first, second))
    what = keys(2)
    first.store(what)
    shared(first, 2)
    adapter = second.adapter

    def lock() -> None:
        task = adapter.submit_lookup_and_lock_task(what, {0: layout()})
        found = []
        wait_for(lambda: found.append(adapter.query_lookup_and_lock_result(task)) or found[-1] is not None)
        assert found[-1].popcount() == 2

    lock()
    assert second.fetch(what) == 2
    kept(second, 2)
    lock()
    adapter.submit_unlock(what)
    adapter.delete(what)
    assert len(second.chunks()) == 2
    adapter.submit_unlock(what)
    adapter.delete(what)
    assert second.chunks() == []


@pytest.mark.parametrize(
    ("behind", "named"),
    [
        ({"type": "resp"}, "behind"),
        ({"type": "no-such-store"}, "no-such-store"),
        ({"type": "nixl_store"}, "several hosts share"),
        ("redis://host", "a type"),
        ({"type": "fs", "base_path": "/x", "serde": {"type": "fp8"}}, "behind.serde"),
    ],
)
def test_a_wrong_store_behind_ends_the_start(node, behind, named):
    """What could never work is refused at once, by the setting's name."""
    with pytest.raises(ConfigError, match=named):
        node(behind=behind)


@pytest.mark.parametrize("name", ["password", "token", "aws_secret_access_key", "access_key"])
def test_an_error_of_the_store_behind_shows_no_secret(name):
    """It goes to the log of whoever starts the server."""
    with pytest.raises(ConfigError) as caught:
        parse_remote({"type": "no-such-store", name: "hidden"})
    assert "no-such-store" in str(caught.value) and "hidden" not in str(caught.value)
