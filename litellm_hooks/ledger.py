"""The work each server has been given and not yet finished, on leases that end by themselves."""

from __future__ import annotations

from collections import deque

import msgspec


class Lease(msgspec.Struct):
    """One call that left. Tokens are estimates; times are seconds on the caller's clock."""

    call_id: str
    server: str
    prefill_tokens: float
    taken_at: float
    expires_at: float
    queued_tokens: float
    """Prefill tokens of the server when the lease was taken, its own included."""
    in_prefill: bool = True
    ended: bool = False


class ServerLoad(msgspec.Struct):
    """What is known of one server's load."""

    prefill_tokens: float = 0.0
    """Leased tokens that are still to be prefilled."""
    running: int = 0
    """Leases not yet released."""
    elsewhere_tokens: float = 0.0
    """The same, leased by other workers (shared by Redis)."""
    elsewhere_running: int = 0
    polled_waiting: int = 0
    """Requests waiting at the server beyond those leased, by its own metrics."""
    pressed: bool = False
    """The server's KV pool is full and requests wait for it, by its own metrics."""


class Ledger:
    """Leases by call, load by server. Every call of it is constant time, amortised.

    A lease's prefill part ends with the first token of the answer. An answer that does not stream shows no first
    token: its prefill part ends when the server, at the rate it was last seen to prefill, would have done it.
    Not safe for several threads at once.
    """

    def __init__(self, ttl_s: float, rate: float) -> None:
        self.ttl_s = ttl_s
        self.default_rate = rate
        self.expired = 0
        self._leases: dict[str, Lease] = {}
        self._by_ttl: dict[float, deque[Lease]] = {}
        self._loads: dict[str, ServerLoad] = {}
        self._fifo: dict[str, deque[Lease]] = {}
        self._rates: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def load(self, server: str) -> ServerLoad:
        """The server's load, live: later leases change it."""
        load = self._loads.get(server)
        if load is None:
            load = self._loads[server] = ServerLoad()
        return load

    def rate(self, server: str) -> float:
        """Prefill rate in tokens a second: what the server was last seen to do, the configured one before that."""
        return self._rates.get(server, self.default_rate)

    def servers(self) -> list[str]:
        return list(self._loads)

    def take(self, call_id: str, server: str, prefill_tokens: float, now: float, ttl_s: float | None = None) -> None:
        """A call leaves for `server`. A lease that the same call still held is released first."""
        self.release(call_id)
        self.expire(now)
        load = self.load(server)
        load.prefill_tokens += prefill_tokens
        load.running += 1
        lasts = self.ttl_s if ttl_s is None else ttl_s
        lease = Lease(call_id, server, prefill_tokens, now, now + lasts, load.prefill_tokens)
        self._leases[call_id] = lease
        self._by_ttl.setdefault(lasts, deque()).append(lease)
        self._fifo.setdefault(server, deque()).append(lease)

    def first_token(self, call_id: str, now: float) -> None:
        """The call's answer began: its prefill is done, and so is that of every call the server took before it."""
        lease = self._leases.get(call_id)
        if lease is None or not lease.in_prefill:
            return
        waited = now - lease.taken_at
        if lease.queued_tokens >= 256 and waited > 0:
            seen = lease.queued_tokens / waited
            self._rates[lease.server] = 0.8 * self.rate(lease.server) + 0.2 * seen
        self._end_prefill(lease)

    def release(self, call_id: str) -> bool:
        """The call ended, however it ended. False where it held no lease (any more)."""
        lease = self._leases.pop(call_id, None)
        if lease is None:
            return False
        self._end_prefill(lease)
        lease.ended = True
        self.load(lease.server).running -= 1
        return True

    def expire(self, now: float) -> None:
        """Releases what outlived its time, and ends prefills that must be done by now."""
        for lasts, leases in self._by_ttl.items():
            while leases and (leases[0].ended or leases[0].expires_at <= now):
                oldest = leases.popleft()
                if not oldest.ended:
                    self.expired += lasts == self.ttl_s
                    self.release(oldest.call_id)
        for server, fifo in self._fifo.items():
            while fifo:
                head = fifo[0]
                if head.in_prefill and now - head.taken_at < 2.0 * head.queued_tokens / self.rate(server) + 1.0:
                    break
                self._end_prefill(head)
                fifo.popleft()

    def _end_prefill(self, lease: Lease) -> None:
        if lease.in_prefill:
            lease.in_prefill = False
            load = self.load(lease.server)
            load.prefill_tokens = max(0.0, load.prefill_tokens - lease.prefill_tokens)
