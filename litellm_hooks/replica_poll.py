"""What replicas say of themselves: vLLM's /metrics, looked at in the background."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import httpx
import msgspec

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "process_start_time_seconds": "started_at",
}


class Reading(msgspec.Struct):
    """One look at a replica. `running` and `waiting` are requests, `kv_usage` a share of 1; sums over its engines."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    prompt_tokens: float = -1.0
    started_at: float = 0.0

    def restarted_since(self, earlier: Reading) -> bool:
        """Whether the server is another life than the one read before: it started later, or its counter fell."""
        later = earlier.started_at > 0 and self.started_at > earlier.started_at + 1.0
        return later or 0 <= self.prompt_tokens < earlier.prompt_tokens


def parse_metrics(text: str) -> Reading:
    """Reads Prometheus text; lines it does not know or cannot read are skipped."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        name = _NAMES.get(line.partition("{")[0].partition(" ")[0])
        if name is None:
            continue
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        found[name] = max(found.get(name, 0.0), value) if name == "kv_usage" else found.get(name, 0.0) + value
    return Reading(**found)


def metrics_url(api_base: str) -> str:
    """Where vLLM serves metrics: beside /v1, not under it."""
    return api_base.rstrip("/").removesuffix("/v1") + "/metrics"


class ReplicaPoll:
    """Asks every replica in turn and at once; an answer or its absence (None) goes to `seen`."""

    def __init__(
        self,
        every_s: float,
        timeout_s: float,
        servers: Callable[[], list[str]],
        seen: Callable[[str, Reading | None], None],
    ) -> None:
        self.every_s, self.timeout_s, self.servers, self.seen = every_s, timeout_s, servers, seen

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=self.timeout_s, trust_env=False) as client:
            while True:
                await asyncio.gather(*(self.look(client, server) for server in self.servers()))
                await asyncio.sleep(self.every_s)

    async def look(self, client: httpx.AsyncClient, server: str) -> None:
        if not server.startswith(("http://", "https://")):
            return
        reading: Reading | None = None
        try:
            answer = await asyncio.wait_for(client.get(metrics_url(server)), self.timeout_s)
            if answer.status_code == 200:
                reading = parse_metrics(answer.text)
        except (httpx.HTTPError, TimeoutError, OSError, ValueError):
            reading = None
        self.seen(server, reading)
