"""LMCache's multi-process server as a thing to start and stop."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvtier.engine import EngineSpec, free_port
from kvtier.process import KeptProcess
from kvtier.scrape import Metrics

READY_S = 90.0
# What vLLM needs to reach the server: LMCache's connector, a failed load that is computed again, and the mark that
# proves to NvmeL2Adapter whose KV it is.
KV_TRANSFER = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class LmcacheServerError(RuntimeError):
    """The server ended or did not answer in time; the message ends with the last lines of its log."""


class LmcacheServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. `l2_adapters`: JSON objects as --l2-adapter takes them. `l1_gb`: host memory of LMCache's own
    cache, which must hold a whole hit."""

    log: Path
    l2_adapters: tuple[dict[str, Any], ...] = ()
    l1_gb: float = 1.0
    args: tuple[str, ...] = ()
    env: dict[str, str | None] = {}
    ready_timeout_s: float = READY_S
    grace_s: float = 15.0


def nvme_adapter(root: Path, quota_gib: float, **params: Any) -> dict[str, Any]:
    """The --l2-adapter of this project's tier."""
    return {
        "type": "plugin",
        "module_path": "lmcache_nvme_backend",
        "class_name": "NvmeL2Adapter",
        "adapter_params": {"root_dir": str(root), "quota_gib": quota_gib, **params},
    }


class LmcacheServer:
    """A running server on 127.0.0.1 with its log in a file; nothing of it is left after `stop` or `kill`."""

    def __init__(self, spec: LmcacheServerSpec) -> None:
        """Start and wait until it answers on its port. Raises LmcacheServerError."""
        self.spec = spec
        self.port, self.metrics_port = free_port(), free_port()
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--prometheus-port", str(self.metrics_port)]
        # `auto` is what works with an engine on a CPU.
        command += ["--supported-transfer-mode", "auto", "--l1-size-gb", str(spec.l1_gb), "--eviction-policy", "LRU"]
        for adapter in spec.l2_adapters:
            command += ["--l2-adapter", json.dumps(adapter)]
        base = EngineSpec(model=spec.log, log=spec.log, env=spec.env).environment(os.environ)
        self.process = KeptProcess([*command, *spec.args], base, spec.log, grace_s=spec.grace_s)
        deadline = time.monotonic() + spec.ready_timeout_s
        while not self._answers():
            if self.process.returncode() is not None or time.monotonic() > deadline:
                code = self.process.stop()
                raise LmcacheServerError(
                    f"LMCache's server did not start (exit status {code}). Its log ends so ({spec.log}):\n"
                    f"{self.process.log_tail()}"
                )
            time.sleep(0.2)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def kv_transfer(self) -> dict[str, Any]:
        """What an engine's --kv-transfer-config has to be."""
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port, "kvtier.identity": "auto"}
        return {**KV_TRANSFER, "kv_connector_extra_config": extra}

    def metrics(self) -> Metrics:
        """Scrape /metrics."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        return Metrics(httpx.get(url, timeout=10, trust_env=False).raise_for_status().text)

    def stop(self) -> int:
        """End it as an operator would. Returns the exit status."""
        return self.process.stop()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()

    def __enter__(self) -> LmcacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
