"""Where a request goes: pure decision code over a table of prefixes and a ledger of work. No LiteLLM in here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from litellm_hooks.ledger import Ledger
from litellm_hooks.prefix import Prefix
from litellm_hooks.prefix_table import PrefixTable
from litellm_hooks.rendezvous import rendezvous_order


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may serve the request: its name, the server its load is counted on, its relative capacity."""

    name: str
    server: str
    weight: float = 1.0


class Decision(msgspec.Struct, frozen=True):
    """Where one request goes and why. Tokens are estimates from the prompt's characters."""

    chosen: str
    reason: str
    """`prefix`: to where it lies. `rendezvous`: by hash. `moved`: away from where it lies, since waiting there costs
    more than prefilling again. `spill`: a new session past the first of its order. `bound`: the last resort."""
    predicted_tokens: float
    total_tokens: float
    home: str
    """The replica it would have gone to, had load not counted."""
    first: str
    """The first of the rendezvous order: where a worker that knows nothing of the session would look for it."""
    held: int = -1
    """Index of the deepest key that `chosen` was believed to hold, -1 for none."""


class Rules(msgspec.Struct, frozen=True):
    """The weights of a decision, all in prompt tokens."""

    load_bound: float = 1.25
    """Times the mean work in flight that a replica may hold before sessions leave it, come what may."""
    bound_slack_tokens: float = 200_000.0
    """Work every replica may hold before the bound counts."""
    move_cost: float = 8.0
    """What a token that is prefilled again weighs against a token of waiting: it delays everybody else there too."""
    decode_tokens: float = 256.0
    """What a running answer weighs against tokens that wait to be prefilled."""
    spill_tokens: float = 2048.0
    """Difference of load under which a session stays, or a new one goes to the first of its rendezvous order."""
    blind_spill_tokens: float = 65_536.0
    """The same for a worker that others do not tell what they place: it takes their sessions for new ones, and would
    spill what lies at the first of its order. Measured by benchmarks/routing.py --workers."""
    pressed_tokens: float = 32_768.0
    """What a full KV pool with requests waiting weighs."""
    waiting_tokens: float = 2048.0
    """What a waiting request that this hook did not send weighs."""


class Placement:
    """Decides, and remembers what it decided. Not safe for several threads at once."""

    def __init__(self, table: PrefixTable, ledger: Ledger, rules: Rules) -> None:
        self.table, self.ledger, self.rules = table, ledger, rules
        self.blind = False
        """Whether other workers place sessions of which this one does not hear."""

    def work(self, candidate: Candidate) -> float:
        """The candidate's work in flight, in prefill tokens for a capacity of one."""
        load, rules = self.ledger.load(candidate.server), self.rules
        tokens = (
            load.prefill_tokens
            + load.elsewhere_tokens
            + rules.decode_tokens * (load.running + load.elsewhere_running)
            + rules.waiting_tokens * load.polled_waiting
            + (rules.pressed_tokens if load.pressed else 0.0)
        )
        return tokens / candidate.weight

    def decide(self, prefix: Prefix, candidates: Sequence[Candidate], chars_per_token: float, now: float) -> Decision:
        """The best of `candidates` (at least one, distinct names) for a prompt with at least one key."""
        self.ledger.expire(now)
        rules = self.rules
        by_name = {candidate.name: candidate for candidate in candidates}
        total = prefix.size / chars_per_token
        depth = self.table.longest(prefix, list(by_name))
        held = {name: prefix.ends[index] / chars_per_token for name, index in depth.items()}
        order = rendezvous_order(prefix.anchor, {c.name: c.weight for c in candidates})
        work = {name: self.work(candidate) for name, candidate in by_name.items()}
        # The deepest comes first, of equals the one that was given the prefix last: a session stays where it moved to.
        home = next(iter(held), order[0])
        at_home = held.get(home, 0.0)

        def answer(chosen: str, reason: str) -> Decision:
            return Decision(chosen, reason, held.get(chosen, 0.0), total, home, order[0], depth.get(chosen, -1))

        if len(order) == 1:
            return answer(home, "prefix" if at_home else "rendezvous")

        def cost(name: str) -> float:
            """Tokens of waiting and prefilling, a token that home would save counted `move_cost` times."""
            return work[name] + rules.move_cost * (at_home - held.get(name, 0.0)) / by_name[name].weight

        margin = rules.blind_spill_tokens if self.blind else rules.spill_tokens
        limit = work[home] - margin
        best = min(order, key=cost)
        if best != home and cost(best) < limit:
            return answer(best, "moved" if at_home else "spill")
        mean = sum(work.values()) / len(work)
        if work[home] > rules.load_bound * mean + rules.bound_slack_tokens:
            lightest = min(order, key=lambda name: work[name])
            if lightest != home:
                return answer(lightest, "bound")
        return answer(home, "prefix" if at_home else "rendezvous")
