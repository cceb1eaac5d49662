"""Two LMCache servers with their own NVMe directories over one real Redis server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.engine import free_port

from .conftest import keys, wait_for


class Redis:
    """A real Redis server on 127.0.0.1, with nothing on disk."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            pytest.skip("neither redis-server nor valkey-server is installed")
        self._command = [binary, "--save", "", "--bind", "127.0.0.1", "--dir", str(folder), "--port"]
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([*self._command, str(self.port)], stdout=subprocess.DEVNULL)
        wait_for(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def ask(self, *words: str) -> str:
        """One command, its answer as the server writes it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(f"*{len(words)}\r\n".encode() + b"".join(f"${len(w)}\r\n{w}\r\n".encode() for w in words))
            return connection.recv(1 << 20).decode(errors="replace")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def hosts(node, redis, tmp_path):
    """A factory of hosts: each has a root of its own, and all the same Redis behind."""

    def make(name: str, **params):
        behind = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
        host = node(tmp_path / name, behind=behind, **params)
        host.adapter.behind.remote.wait_up(20)
        return host

    return make


def shared(host, count: int) -> None:
    """Wait until the store behind has taken so many chunks of this host."""
    wait_for(lambda: host.adapter.behind.counts.snapshot().get("stored", 0) >= count)


def kept(host, count: int) -> None:
    """Wait until so many chunks from behind lie in this host's own store."""
    wait_for(lambda: host.adapter.behind.counts.snapshot().get("kept", 0) >= count)


def test_what_one_host_stored_the_other_serves_and_keeps(hosts, redis):
    """The second host has every byte of it, from Redis first, and from its own disk once Redis is gone."""
    first, second = hosts("a"), hosts("b")
    what = keys(6)
    first.store(what)
    shared(first, 6)
    assert second.fetch(what) == 6
    kept(second, 6)
    redis.stop()
    second.forget()
    assert second.fetch(what) == 6
    second.close()
    assert hosts("b").fetch(what) == 6
