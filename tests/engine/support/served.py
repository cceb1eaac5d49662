"""An engine under `kvtier launch` (or vLLM itself) that a test can restart from a shell command; nothing of it is
left afterwards."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from kvtier.engine import free_port
from kvtier.process import KeptProcess
from tests.engine.support.installed import python_path

READY_S = 420.0
SMALL_POOL_TOKENS = 4096
_CPU_BLOCK = 128
"""vLLM's block size on a CPU."""


def small_pool_arguments(port: int) -> list[str]:
    """Arguments for a quick start, and a pool so small that a few thousand tokens evict a document."""
    return [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--max-model-len",
        "2048",
        "--max-num-batched-tokens",
        "2048",
        "--block-size",
        str(_CPU_BLOCK),
        "--num-gpu-blocks-override",
        str(SMALL_POOL_TOKENS // _CPU_BLOCK),
    ]


class Served:
    """One engine at a port, started by a command; `restart` starts the same command again."""

    def __init__(self, command: list[str], port: int, folder: Path, env: dict[str, str] | None = None) -> None:
        self.command, self.port, self.folder = command, port, folder
        self.log = folder / "engine.log"
        self.env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONPATH": python_path(folder / "site"),
            **(env or {}),
        }
        self.env.pop("PYTHONHASHSEED", None)
        self.env |= env or {}
        self.process: KeptProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait for /health; fails with the end of the log where the engine ends or takes too long."""
        self.process = KeptProcess(self.command, self.env, self.log)
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            assert self.process.returncode() is None, (
                f"ended with {self.process.returncode()}:\n{self.process.log_tail(40)}"
            )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"not ready in {READY_S:.0f} s:\n{self.process.log_tail(40)}")

    def stop(self) -> int | None:
        """SIGTERM, and its exit code."""
        process, self.process = self.process, None
        return process.stop() if process else None

    @contextlib.contextmanager
    def restart_command(self) -> Iterator[str]:
        """A shell command that restarts the engine and ends once it is up, for as long as this context lasts."""
        ask, done = self.folder / "restart-ask", self.folder / "restart-done"
        os.mkfifo(ask)
        os.mkfifo(done)

        def obey() -> None:
            if ask.read_text().strip() != "restart":
                return
            try:
                self.stop()
                self.start()
                answer = "up"
            except BaseException as error:
                answer = f"failed: {error}"
            done.write_text(answer)

        thread = threading.Thread(target=obey, daemon=True)
        thread.start()
        try:
            yield f"echo restart > {shlex.quote(str(ask))}; grep -q ^up {shlex.quote(str(done))}"
        finally:
            if thread.is_alive() and ask.exists():  # nobody asked: let the thread end
                with contextlib.suppress(OSError):
                    descriptor = os.open(ask, os.O_WRONLY | os.O_NONBLOCK)
                    os.close(descriptor)
            thread.join(timeout=READY_S)
            ask.unlink()
            done.unlink()


def kvtier(*words: str) -> list[str]:
    """The command `kvtier` of this checkout."""
    return [sys.executable, "-m", "kvtier.cli", *words]


__all__ = ["READY_S", "SMALL_POOL_TOKENS", "Served", "free_port", "kvtier", "small_pool_arguments"]
