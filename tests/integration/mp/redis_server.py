"""A real Redis or Valkey server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from kvtier.engine import free_port
from tests.integration.mp.conftest import wait_for


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
            parts = [f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word)), ""]
            connection.sendall("\r\n".join(parts).encode())
            return connection.recv(1 << 20).decode(errors="replace")

    def names(self, pattern: str) -> list[str]:
        return [word for word in self.ask("KEYS", pattern).split("\r\n") if "@" in word]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
