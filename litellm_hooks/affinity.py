"""The hook's mind: everything it knows and decides, under one lock, without LiteLLM.

The hooks of one request arrive on the proxy's loop, some from another thread; every method here takes the lock, does
constant or prompt-sized work, and never waits for anything else.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from litellm_hooks import metrics
from litellm_hooks.calls import Call, Calls
from litellm_hooks.ledger import Ledger
from litellm_hooks.placement import Candidate, Decision, Placement, Rules
from litellm_hooks.prefix import NO_PREFIX, Prefix, SessionMemory, chat_prefix, text_prefix
from litellm_hooks.prefix_table import PrefixTable
from litellm_hooks.replica import Replica
from litellm_hooks.replica_poll import Reading
from litellm_hooks.settings import Settings
from litellm_hooks.shared_state import Load, Place

PENDING_S = 2.0
"""A decision counts as load at once, for so long, so that a burst does not see an empty ledger."""

HIT_WORTH_CHECKING = 1024.0
"""Predicted tokens from which a measured miss says something."""

PRESSED_USAGE = 0.95
MAX_RESPONSES = 50_000


class Usage(msgspec.Struct, frozen=True):
    """What an answer said of its prompt; `cached` None where it said nothing."""

    prompt_tokens: int
    cached: int | None


class Affinity:
    """Tables, leases, calls and settings of one worker."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.clock = settings, clock
        self.lock = threading.Lock()
        self.memory = SessionMemory()
        self.table = PrefixTable(settings.table_entries)
        self.ledger = Ledger(settings.lease_ttl_s, settings.prefill_tokens_per_s)
        rules = Rules(
            load_bound=settings.load_bound,
            bound_slack_tokens=settings.bound_slack_tokens,
            move_cost=settings.move_cost,
            spill_tokens=settings.spill_tokens,
            blind_spill_tokens=settings.blind_spill_tokens,
            decode_tokens=settings.decode_tokens,
        )
        self.placement = Placement(self.table, self.ledger, rules)
        self.calls = Calls()
        self.replicas: dict[str, Replica] = {}
        """By deployment id: every replica a request could have gone to."""
        self.on_place: Callable[[Place], None] = lambda place: None
        self._ratios: dict[str, float] = {}
        self._reporting: set[str] = set()
        self._responses: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._readings: dict[str, Reading] = {}

    # What a request is

    def prefix(self, call: Call, messages: Any, request: Mapping[str, Any], raw_prompt: bool) -> Prefix:
        """The request's prefix, worked out once a call."""
        if call.prefix.keys:
            return call.prefix
        with self.lock:
            call.prefix = self._prefix(call.group, messages, request, raw_prompt)
        return call.prefix

    def _prefix(self, group: str, messages: Any, request: Mapping[str, Any], raw_prompt: bool) -> Prefix:
        if raw_prompt:
            prompt = messages[0].get("content") if messages and isinstance(messages[0], Mapping) else messages
            if isinstance(prompt, str):
                return text_prefix(group, prompt, request)
        turns: Any = messages
        earlier = 0
        if turns is None:
            turns = request.get("input")
            known = self._responses.get(str(request.get("previous_response_id")))
            earlier = known[0] if known is not None else 0
        if isinstance(turns, str):
            turns = [turns]
        if not isinstance(turns, Sequence) or not turns or isinstance(turns, bytes):
            return NO_PREFIX
        return chat_prefix(group, turns, request, self.memory, earlier)

    def chars_per_token(self, group: str) -> float:
        return self._ratios.get(group, self.settings.chars_per_token)

    # Where it goes

    def know(self, replicas: Sequence[Replica]) -> None:
        """The replicas of a request, so that later hooks can name them by deployment id."""
        for replica in replicas:
            self.replicas[replica.id] = replica

    def decide(self, call: Call, replicas: Sequence[Replica], weights: Sequence[float]) -> Decision:
        """Chooses one of `replicas` (at least one) for a call whose prefix has keys."""
        distinct = {r.name: Candidate(r.name, r.name, weight) for r, weight in zip(replicas, weights)}
        ratio = self.chars_per_token(call.group)
        with self.lock:
            now = self.clock()
            decision = self.placement.decide(call.prefix, list(distinct.values()), ratio, now)
            call.decision, call.reason, call.replica = decision, decision.reason, decision.chosen
            call.left = False
            uncached = max(0.0, decision.total_tokens - decision.predicted_tokens)
            self.ledger.take(call.call_id, decision.chosen, uncached, now, ttl_s=PENDING_S)
        return decision

    def unplaced(self, call: Call) -> None:
        """None of the places that were chosen will do; the call goes where LiteLLM sends it."""
        with self.lock:
            self.ledger.release(call.call_id)

    def pinned(self, call: Call, replica: Replica, reason: str) -> None:
        """The call goes to `replica` whatever its prefix says."""
        with self.lock:
            call.decision, call.reason, call.replica, call.left = None, reason, replica.name, False

    def response_home(self, response_id: str) -> str | None:
        """The replica that gave this response, by this worker's memory."""
        known = self._responses.get(response_id)
        return known[1] if known is not None else None

    # What becomes of it

    def left(self, call: Call, replica: Replica) -> None:
        """The attempt is on its way to `replica`, chosen by the hook or by LiteLLM among several. Safe to repeat."""
        with self.lock:
            if call.left and call.replica == replica.name:
                return
            decision = call.decision
            total = call.prefix.size / self.chars_per_token(call.group)
            predicted = decision.predicted_tokens if decision and decision.chosen == replica.name else 0.0
            call.replica, call.deployment_id, call.left = replica.name, replica.id, True
            self.ledger.take(call.call_id, replica.name, max(0.0, total - predicted), self.clock())
            if not call.prefix.keys:
                return
            self.table.record(call.prefix, replica.name)
            held = decision.held if decision is not None and decision.chosen == decision.home else -1
            self.on_place(Place.of(call.prefix, held, replica.name))
        metrics.PREDICTED.inc(predicted)

    def first_token(self, call_id: str) -> None:
        with self.lock:
            self.ledger.first_token(call_id, self.clock())

    def ended(self, call_id: str, aborted: bool = False) -> None:
        """The call is over, however it ended. Safe to repeat."""
        with self.lock:
            call = self.calls.get(call_id)
            if call is not None:
                call.ended = True
                call.aborted = call.aborted or aborted
            self.ledger.release(call_id)

    def failed(self, call: Call, deployment_id: str, server_gone: bool) -> None:
        """An attempt failed at a deployment; `server_gone` where nothing answered there at all."""
        replica = self.replicas.get(deployment_id)
        with self.lock:
            call.failed.add(deployment_id)
            sent, call.left = call.left, False
            self.ledger.release(call.call_id)
            decision = call.decision
            if sent and replica is not None and call.prefix.keys:
                # What it was to prefill it did not; what it held before, it may hold still.
                known = decision.held if decision is not None and decision.chosen == replica.name else -1
                self.table.forget(call.prefix, replica.name, after=known)
            if server_gone and replica is not None and replica.tier != "nvme":
                self.table.forget_replica(replica.name)
                metrics.FORGOTTEN.labels("gone").inc()
        metrics.FAILOVERS.labels(deployment_id).inc()

    def measured(self, call: Call, replica: Replica, usage: Usage) -> None:
        """The answer told how much of the prompt was cached. Corrects the table and the characters a token."""
        prefix = call.prefix
        metrics.PROMPTED.inc(usage.prompt_tokens)
        metrics.MEASURED.inc(usage.cached or 0)
        with self.lock:
            if usage.prompt_tokens >= 200 and prefix.size:
                ratio = min(16.0, max(0.5, prefix.size / usage.prompt_tokens))
                self._ratios[call.group] = 0.9 * self.chars_per_token(call.group) + 0.1 * ratio
            if usage.cached is None or call.aborted or not prefix.keys:
                return
            if usage.cached > 0:
                self._reporting.add(replica.name)
            decision = call.decision
            if decision is None or decision.chosen != replica.name or decision.predicted_tokens < HIT_WORTH_CHECKING:
                return
            # A replica that never reported a cached token may not report any (vLLM does not unless it is told to).
            if replica.name in self._reporting and self.table.measured(prefix, replica.name, usage.cached > 0):
                metrics.FORGOTTEN.labels("measured").inc()

    def remember_response(self, response_id: str, call: Call, replica: Replica) -> None:
        if not call.prefix.keys:
            return
        with self.lock:
            self._responses[response_id] = (call.prefix.keys[-1], replica.name)
            while len(self._responses) > MAX_RESPONSES:
                self._responses.popitem(last=False)

    # What others say

    def polled(self, server: str, reading: Reading | None) -> None:
        """A replica's own metrics, None where it did not answer."""
        with self.lock:
            load = self.ledger.load(server)
            if reading is None:
                load.polled_waiting, load.pressed = 0, False
                return
            ours = load.running + load.elsewhere_running
            load.polled_waiting = max(0, round(reading.running + reading.waiting) - ours)
            load.pressed = reading.kv_usage >= PRESSED_USAGE and reading.waiting > 0
            earlier = self._readings.get(server)
            self._readings[server] = reading
            tiers = {replica.tier for replica in self.replicas.values() if replica.name == server}
            if earlier is not None and reading.restarted_since(earlier) and tiers and "nvme" not in tiers:
                self.table.forget_replica(server)
                metrics.FORGOTTEN.labels("restarted").inc()

    def heard_places(self, places: list[Place]) -> None:
        with self.lock:
            for place in places:
                self.table.record(place.prefix, place.replica)

    def hears(self, others: bool, told: bool) -> None:
        """Whether other workers are known to run, and whether they are being heard."""
        self.placement.blind = others and not told

    def heard_load(self, loads: dict[str, Load]) -> None:
        with self.lock:
            for server in {*self.ledger.servers(), *loads}:
                load = self.ledger.load(server)
                load.elsewhere_tokens, load.elsewhere_running = loads.get(server, (0.0, 0))

    def own_load(self) -> dict[str, Load]:
        with self.lock:
            self.ledger.expire(self.clock())
            loads = {server: self.ledger.load(server) for server in self.ledger.servers()}
            return {name: (load.prefill_tokens, load.running) for name, load in loads.items() if load.running}

    def id_of(self, name: str) -> str:
        """The deployment id people know a replica by."""
        return next((replica.id for replica in self.replicas.values() if replica.name == name), name)

    def servers(self) -> list[str]:
        return sorted({replica.name for replica in self.replicas.values()})

    def publish(self) -> None:
        """Brings the gauges up to date; called once a second, not once a request."""
        with self.lock:
            self.ledger.expire(self.clock())
            loads = {name: (load.running, load.prefill_tokens) for name, load in self._loads()}
            metrics.TABLE.set(len(self.table))
            metrics.EXPIRED.set(self.ledger.expired)
        for name, (running, tokens) in loads.items():
            metrics.IN_FLIGHT.labels(name).set(running)
            metrics.BACKLOG.labels(name).set(tokens)

    def _loads(self) -> list[tuple[str, Any]]:
        return [(server, self.ledger.load(server)) for server in self.ledger.servers()]
