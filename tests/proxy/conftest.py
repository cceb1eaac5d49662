"""The real LiteLLM proxy in front of small model servers, as processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("litellm.proxy.proxy_cli", reason="litellm[proxy] is not installed")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs" / "examples" / "litellm-proxy.yaml"
KEY = "sk-Tests-0123456789abcdefABCDEF-ghijkl"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Callable[[], Any], seconds: float = 30.0, every: float = 0.05) -> Any:
    """Polls until `what` answers with something true; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(every)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


class Process:
    """A child in a process group of its own, ended with everything it started."""

    def __init__(
        self, command: list[str], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
            )

    def end(self, sign: int = signal.SIGTERM) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, sign)
            try:
                self.child.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait(15)


class ModelServer:
    """One replica: a model server that can be killed and started again at its port."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.name, self.folder, self.options = name, folder, options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.base = f"{self.url}/v1"
        self.process: Process | None = None

    def start(self) -> None:
        script = Path(__file__).with_name("model_server.py")
        command = [sys.executable, str(script), "--port", str(self.port), "--name", self.name,
                   *(option.format(folder=self.folder, name=self.name) for option in self.options)]  # fmt: skip
        self.process = Process(command, self.folder / f"{self.name}.log")

    def ready(self) -> None:
        wait_for(lambda: answers(f"{self.url}/health"))

    def kill(self) -> None:
        assert self.process is not None
        self.process.end(signal.SIGKILL)

    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/_requests").json()
        return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/_state").json()
        return found


@contextmanager
def model_servers(folder: Path, names: list[str], *options: str) -> Iterator[list[ModelServer]]:
    servers = [ModelServer(name, folder, *options) for name in names]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.ready()
        yield servers
    finally:
        for server in servers:
            if server.process is not None:
                server.process.end(signal.SIGKILL)


def example(group: str, servers: list[ModelServer], **settings: Any) -> dict[str, Any]:
    """The example configuration, one of its groups, pointed at `servers`, with other settings of the hook."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    entries = [entry for entry in config["model_list"] if entry["model_name"] == group]
    assert len(entries) == len(servers)
    for entry, server in zip(entries, servers):
        entry["litellm_params"]["api_base"] = server.base
        server.id = entry["model_info"]["id"]  # type: ignore[attr-defined]
    config["model_list"] = entries
    config["callback_settings"]["prefix_affinity"].update(settings)
    return config


class Proxy:
    """A running proxy. `ask` sends a chat and answers with the httpx response."""

    def __init__(self, url: str, process: Process, folder: Path) -> None:
        self.url, self.process, self.folder = url, process, folder
        self.client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60.0)

    def ask(self, messages: list[dict[str, Any]], model: str = "coder", **body: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"model": model, "messages": messages, **body})

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")


def proxy_environment(folder: Path, overlay: Path | None = None, **extra: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFIX_AFFINITY_", "REDIS_"))}
    env.update(
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_MASTER_KEY=KEY,
        PYTHONPATH=os.pathsep.join([str(overlay or ROOT), str(ROOT), str(folder), env.get("PYTHONPATH", "")]),
        **extra,
    )
    return env


def proxy_command(folder: Path, config: dict[str, Any], port: int, workers: int) -> list[str]:
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(config))
    code = "from litellm.proxy.proxy_cli import run_server; run_server()"
    return [sys.executable, "-c", code, "--config", str(path), "--host", "127.0.0.1", "--port", str(port),
            "--num_workers", str(workers)]  # fmt: skip


@contextmanager
def running_proxy(
    folder: Path, config: dict[str, Any], workers: int = 1, overlay: Path | None = None, **env: str
) -> Iterator[Proxy]:
    """`overlay`: another release of LiteLLM than the installed one."""
    port = free_port()
    command = proxy_command(folder, config, port, workers)
    process = Process(command, folder / "proxy.log", env=proxy_environment(folder, overlay, **env), cwd=folder.parent)
    proxy = Proxy(f"http://127.0.0.1:{port}", process, folder)
    try:

        def up() -> bool:
            assert process.child.poll() is None, proxy.log()[-3000:]
            return proxy.log().count("Application startup complete") >= workers and answers(
                f"{proxy.url}/health/liveliness"
            )

        wait_for(up, seconds=280, every=0.2)  # four workers import LiteLLM at once
        yield proxy
    finally:
        proxy.client.close()
        process.end()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Process, int]]:
    """A Redis server of the test's own: (host, process, port)."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    process = Process(
        [binary, "--port", str(port), "--save", "", "--bind", "127.0.0.1"], folder / "redis.log", cwd=folder
    )
    try:

        def up() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(up)
        yield "127.0.0.1", process, port
    finally:
        process.end(signal.SIGKILL)


def session(number: int | str, turns: int, chars: int = 3000) -> list[dict[str, Any]]:
    """The history of a session at its `turns`-th message; every session has the same system prompt."""
    text = f"session {number} " + "some words of a history " * (chars // 24)
    system = {"role": "system", "content": "You are a careful agent. " * 100}
    return [system, *({"role": ("user", "assistant")[i % 2], "content": f"{i} {text}"} for i in range(turns))]


__all__ = ["EXAMPLE", "KEY", "ROOT", "ExitStack", "example", "model_servers", "running_proxy", "session", "wait_for"]
