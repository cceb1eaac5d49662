"""A vLLM server as a thing to start, ask, measure and stop."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec

from kvtier.doors import PLUGIN_TRANSFER
from kvtier.process import IoCounters, KeptProcess
from kvtier.scrape import Metrics
from kvtier.stream import events

# A port that was free may be taken before vLLM binds it; more often than this in a row is something else.
_PORT_TRIES = 5
_READY_POLL_S = 0.2
_TEMPORARY_FOLDER_BYTES = 30
# What a person's shell may carry that would make two runs differ; the spec's own `env` is applied after.
_DROPPED_PREFIXES = ("LMCACHE_", "VLLM_", "KVTIER_", "PROMETHEUS_MULTIPROC_DIR", "PYTHONHASHSEED")


class EngineStartError(RuntimeError):
    """The engine ended or did not become ready in time; the message ends with the last lines of its log."""


class EngineRequestError(RuntimeError):
    """The engine answered a request with an error; the message is the engine's."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. Paths are absolute; `args` come after the arguments made here, so that they win."""

    model: Path
    log: Path
    lmcache_config: Path | None = None
    port: int = 0
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    kv_pool_gib: int = 1
    kv_transfer: dict[str, Any] = msgspec.field(default_factory=lambda: dict(PLUGIN_TRANSFER))
    args: tuple[str, ...] = ()
    env: dict[str, str | None] = msgspec.field(default_factory=dict)  # None takes a variable away
    ready_timeout_s: float = 300.0
    grace_s: float = 20.0

    def command(self, port: int) -> list[str]:
        """The server's command line. `python -m` works under every distribution name of vLLM, `vllm` does not."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", self.served_name]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += ["--max-model-len", str(self.max_model_len)]
        command += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        if self.lmcache_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*command, *self.args]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The server's environment: offline, no telemetry, a fixed hash seed."""
        env = {name: value for name, value in base.items() if not name.startswith(_DROPPED_PREFIXES)}
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "DO_NOT_TRACK": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_pool_gib),
        }
        if self.lmcache_config is not None:
            env["LMCACHE_CONFIG_FILE"] = str(self.lmcache_config)
        return {name: value for name, value in (env | self.env).items() if value is not None}

    @property
    def served_name(self) -> str:
        """The model's name in requests: its folder's."""
        return self.model.name


class Completion(msgspec.Struct, frozen=True):
    """One streamed answer, timed at the client."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None


class Engine:
    """A running vLLM server on 127.0.0.1 with its log in a file; nothing of it is left after `stop` or `kill`.

    Not thread-safe, except that several threads may call `complete`.
    """

    def __init__(self, spec: EngineSpec, on_wait: Callable[[float], None] = lambda _: None) -> None:
        """Start and wait until it answers; `on_wait` is called with the seconds waited. Raises EngineStartError."""
        self.spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        # Proxies of the environment are not for a server on this machine.
        self._client = httpx.Client(trust_env=False, timeout=httpx.Timeout(10.0, read=600.0))
        # The engine's temporary files, here because a process that is killed cannot remove its own.
        self._temporary = Path(tempfile.mkdtemp(prefix="kvtier-", dir=_short_temporary_folder()))
        environment = spec.environment(os.environ | {"TMPDIR": str(self._temporary)})
        began = time.monotonic()
        try:
            self._start(environment, began, on_wait)
        except BaseException:
            if hasattr(self, "process"):
                self.process.stop()
            self._clean_up()
            raise
        self.ready_s = time.monotonic() - began

    def _start(self, environment: dict[str, str], began: float, on_wait: Callable[[float], None]) -> None:
        spec = self.spec
        for attempt in range(_PORT_TRIES):
            self.port = free_port(spec.port if attempt == 0 else 0)
            log_start = spec.log.stat().st_size if spec.log.exists() else 0
            self.process = KeptProcess(spec.command(self.port), environment, spec.log, grace_s=spec.grace_s)
            if self._wait_until_ready(began, on_wait):
                return
            code = self.process.stop()
            with spec.log.open("rb") as log:
                log.seek(log_start)
                if b"address already in use" not in log.read().lower():
                    break
        raise EngineStartError(f"vLLM ended during start with exit status {code}.\n{self._log_end()}")

    def _wait_until_ready(self, began: float, on_wait: Callable[[float], None]) -> bool:
        """True when it answers, False when it ended."""
        while True:
            waited = time.monotonic() - began
            on_wait(waited)
            if self.process.returncode() is not None:
                return False
            try:
                if self._client.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            if waited > self.spec.ready_timeout_s:
                raise EngineStartError(f"vLLM was not ready after {waited:.0f} s.\n{self._log_end()}")
            time.sleep(_READY_POLL_S)

    def _log_end(self) -> str:
        return f"Its log ends so ({self.spec.log}):\n{self.process.log_tail()}"

    @property
    def url(self) -> str:
        """The server's base address."""
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: str | list[int], max_tokens: int, **body: Any) -> Completion:
        """Stream one greedy completion of a text, or of token ids. `ttft_s` runs from sending the request to the first
        token's arrival.

        Raises EngineRequestError with the engine's message.
        """
        request: dict[str, Any] = {
            "model": self.spec.served_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
        }
        request |= {"stream": True, "stream_options": {"include_usage": True}} | body
        text, ttft_s, finish_reason = "", None, None
        usage: dict[str, int] = {}
        sent = time.perf_counter()
        with self._client.stream("POST", f"{self.url}/v1/completions", json=request) as response:
            if response.status_code != 200:
                raise EngineRequestError(_error_message(response.read()))
            for event in events(response):
                if "error" in event:
                    raise EngineRequestError(str(event["error"].get("message", event["error"])))
                for choice in event["choices"]:
                    ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - sent
                    text += choice["text"]
                    finish_reason = choice["finish_reason"] or finish_reason
                usage = event.get("usage") or usage
        if ttft_s is None or not usage:
            raise EngineRequestError("the stream ended without a token or without its usage")
        return Completion(
            text=text,
            ttft_s=ttft_s,
            total_s=time.perf_counter() - sent,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=finish_reason,
        )

    def count_tokens(self, prompt: str) -> int:
        """The number of tokens that `complete` would see."""
        response = self._client.post(f"{self.url}/tokenize", json={"model": self.spec.served_name, "prompt": prompt})
        if response.status_code != 200:
            raise EngineRequestError(_error_message(response.content))
        return int(response.json()["count"])

    def metrics(self) -> Metrics:
        """Scrape /metrics."""
        return Metrics(self._client.get(f"{self.url}/metrics").raise_for_status().text)

    def settled_io(self) -> IoCounters:
        """The engine's block-layer bytes since its start, once its writes have come to rest."""
        return self.process.settled_io()

    def stop(self) -> int:
        """End it as an operator would: SIGTERM, the grace, SIGKILL. Returns the exit status."""
        try:
            return self.process.stop()
        finally:
            self._clean_up()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL to all of its processes at once."""
        try:
            self.process.kill()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        self._client.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def free_port(preferred: int = 0) -> int:
    """`preferred` where it can be bound on 127.0.0.1, else one that the kernel has free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", preferred))
        except OSError:
            sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _short_temporary_folder() -> str:
    """Where sockets may lie: their paths end after 107 bytes, and vLLM and LMCache add up to 60 to the folder."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _TEMPORARY_FOLDER_BYTES else "/tmp"


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:2000]
