"""What workers tell each other through LiteLLM's Redis: where sessions lie, and the work in flight.

Everything happens in a background task; a request never waits for Redis. Gone or slow, the workers decide by what they
know themselves, which rendezvous hashing makes agree for every session that was not moved.

Keys, all in one hash slot: `{prefix_affinity}:places`, a capped stream of (anchor, keys, replica);
`{prefix_affinity}:workers`, a set; `{prefix_affinity}:load:<worker>`, JSON that expires with its worker.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from litellm_hooks.prefix import Prefix

PLACES = "{prefix_affinity}:places"
WORKERS = "{prefix_affinity}:workers"
LOAD = "{prefix_affinity}:load:"
MAX_PLACES = 50_000
MAX_KEYS = 32
TICK_S = 0.1
PATIENCE_S = 1.0
LOAD_TTL_MS = 2_000

Load = tuple[float, int]
"""Tokens to prefill, calls running."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The session of `anchor` lies at `replica`, as far as each of `keys`."""

    anchor: int
    keys: list[int]
    replica: str

    @classmethod
    def of(cls, prefix: Prefix, held: int, replica: str) -> Place:
        """The keys of `prefix` beyond index `held`, which the others know; of very many, evenly drawn ones."""
        keys = prefix.keys[max(held + 1, prefix.root) :] or prefix.keys[-1:]
        if len(keys) > MAX_KEYS:
            step = len(keys) / MAX_KEYS
            keys = [keys[int((number + 1) * step) - 1] for number in range(MAX_KEYS)]
        return cls(prefix.anchor, keys, replica)

    @property
    def prefix(self) -> Prefix:
        """What is known of the session's prefix, for a table."""
        keys = [self.anchor, *(key for key in self.keys if key != self.anchor)]
        return Prefix(keys, [0] * len(keys), 0, self.anchor)


class SharedState:
    """The background exchange. `client` answers with a redis.asyncio client, or None while there is none."""

    def __init__(
        self,
        client: Callable[[], Any | None],
        own_load: Callable[[], dict[str, Load]],
        on_places: Callable[[list[Place]], None],
        on_load: Callable[[dict[str, Load]], None],
    ) -> None:
        self.client, self.own_load, self.on_places, self.on_load = client, own_load, on_places, on_load
        self.worker = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.failures = 0
        self._outbox: deque[Place] = deque(maxlen=10_000)
        self._last_id = "0"
        self._heard_at = 0.0

    def placed(self, place: Place) -> None:
        """Queues a placement for the others; the oldest are dropped where Redis does not follow."""
        self._outbox.append(place)

    @property
    def alive(self) -> bool:
        """Whether the last exchange is recent enough to go by."""
        return self._heard_at > 0 and time.monotonic() - self._heard_at < 2 * LOAD_TTL_MS / 1000

    async def run(self) -> None:
        pause = TICK_S
        while True:
            await asyncio.sleep(pause)
            try:
                client = self.client()
                if client is None:
                    pause = 1.0
                    continue
                await asyncio.wait_for(self.exchange(client), PATIENCE_S)
                pause = TICK_S
            except Exception:
                self.failures += 1
                pause = min(5.0, pause * 2)
            if self._heard_at and not self.alive:
                self._heard_at = 0.0
                self.on_load({})

    async def exchange(self, client: Any) -> None:
        """One round: own placements and load out, the others' in."""
        sent = list(self._outbox)
        load = msgspec.json.encode(self.own_load())
        pipe = client.pipeline(transaction=False)
        for place in sent:
            fields = {"w": self.worker, "m": msgspec.json.encode(place)}
            pipe.xadd(PLACES, fields, maxlen=MAX_PLACES, approximate=True)
        pipe.set(LOAD + self.worker, load, px=LOAD_TTL_MS)
        pipe.sadd(WORKERS, self.worker)
        pipe.expire(WORKERS, 3600)
        pipe.smembers(WORKERS)
        answers = await pipe.execute()
        for _ in sent:
            self._outbox.popleft()
        others = sorted(_text(name) for name in answers[-1] if _text(name) != self.worker)
        await self._read_loads(client, others)
        await self._read_places(client)
        self._heard_at = time.monotonic()

    async def _read_loads(self, client: Any, others: list[str]) -> None:
        total: dict[str, Load] = {}
        gone = []
        values = await client.mget([LOAD + name for name in others]) if others else []
        for name, value in zip(others, values):
            if value is None:
                gone.append(name)
                continue
            for server, (tokens, running) in msgspec.json.decode(value, type=dict[str, Load]).items():
                have = total.get(server, (0.0, 0))
                total[server] = (have[0] + tokens, have[1] + running)
        if gone:
            await client.srem(WORKERS, *gone)
        self.on_load(total)

    async def _read_places(self, client: Any) -> None:
        while True:
            answer = await client.xread({PLACES: self._last_id}, count=1000)
            entries = answer[0][1] if isinstance(answer, list) and answer else _entries(answer)
            if not entries:
                return
            places = []
            for ident, fields in entries:
                self._last_id = _text(ident)
                named = {_text(key): value for key, value in fields.items()}
                if _text(named.get("w", b"")) == self.worker:
                    continue
                try:
                    places.append(msgspec.json.decode(named["m"], type=Place))
                except (msgspec.DecodeError, KeyError):
                    continue
            self.on_places(places)


def _entries(answer: Any) -> list[Any]:
    """Newer protocol versions answer XREAD with a mapping."""
    if isinstance(answer, dict) and answer:
        first = next(iter(answer.values()))
        return list(first[0]) if first and isinstance(first[0], list) else list(first)
    return []


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
