"""Where a request goes: table, rendezvous order, load."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_hooks.ledger import Ledger
from litellm_hooks.placement import Candidate, Decision, Placement, Rules
from litellm_hooks.prefix import Prefix
from litellm_hooks.prefix_table import PrefixTable
from litellm_hooks.rendezvous import rendezvous_order

CANDIDATES = [Candidate(name, name) for name in ("a", "b", "c", "d")]


def placement(limit: int = 10_000, ttl_s: float = 600.0, **rules: Any) -> Placement:
    return Placement(PrefixTable(limit), Ledger(ttl_s, rate=1000.0), Rules(**rules))


def prefix(session: int, turns: int, tokens: int = 1000, shared: int = 0) -> Prefix:
    """A chain of `turns` keys of a session, after `shared` keys that every session has."""
    keys = [*range(1, shared + 1), *(session * 1000 + i for i in range(1, turns + 1))]
    return Prefix(keys, [(i + 1) * tokens for i in range(len(keys))], shared, keys[shared])


def go(where: Placement, what: Prefix, now: float = 0.0, candidates: list[Candidate] = CANDIDATES) -> Decision:
    decision = where.decide(what, candidates, 1.0, now)
    where.table.record(what, decision.chosen)
    return decision


def test_session_stays_where_its_prefix_lies() -> None:
    """Every later turn goes to the replica of the first, and is predicted to hit all earlier turns."""
    where = placement()
    first = go(where, prefix(1, 1))
    for turns in range(2, 20):
        decision = go(where, prefix(1, turns))
        assert (decision.chosen, decision.reason) == (first.chosen, "prefix")
        assert decision.predicted_tokens == (turns - 1) * 1000


def test_new_sessions_spread_evenly() -> None:
    """Sessions without a prefix are spread by hash: each of four replicas gets a quarter, within a fifth of it."""
    where = placement()
    counts = Counter(go(where, prefix(session, 1)).chosen for session in range(1, 2001))
    assert all(400 <= counts[candidate.name] <= 600 for candidate in CANDIDATES)


def test_workers_agree_without_shared_state() -> None:
    """Two workers that know nothing of each other send a session to one replica."""
    one, other = placement(), placement()
    for session in range(1, 200):
        assert go(one, prefix(session, 1)).chosen == go(other, prefix(session, 3)).chosen


def test_shared_system_prompt_attracts_no_load() -> None:
    """Keys before the root count for nothing: sessions with one system prompt are spread like others."""
    where = placement()
    counts = Counter(go(where, prefix(session, 1, shared=3)).chosen for session in range(1, 801))
    assert len(counts) == 4
    assert max(counts.values()) < 280


def test_longest_prefix_wins() -> None:
    """Of two replicas that hold a part, the one that holds more gets the request."""
    where = placement()
    where.table.record(prefix(1, 2), "a")
    where.table.record(prefix(1, 5), "b")
    assert where.decide(prefix(1, 6), CANDIDATES, 1.0, 0.0).chosen == "b"
    assert where.decide(prefix(1, 2), CANDIDATES, 1.0, 0.0).chosen == "b"


def test_new_session_spills_past_a_loaded_replica() -> None:
    """A session that holds nothing anywhere goes where less work waits, and stays there."""
    where = placement()
    first = go(placement(), prefix(1, 1)).chosen
    where.ledger.take("x", first, 50_000, 0.0)
    decision = go(where, prefix(1, 1))
    assert decision.reason == "spill"
    assert decision.chosen != first
    assert go(where, prefix(1, 2)).chosen == decision.chosen


def test_move_is_weighed_by_what_it_costs() -> None:
    """Behind one backlog, a session with little to prefill again moves and one with much stays."""
    where = placement()
    where.table.record(prefix(1, 1, tokens=2_000), "a")
    where.table.record(prefix(2, 1, tokens=20_000), "a")
    where.ledger.take("x", "a", 60_000, 0.0)
    assert where.decide(prefix(1, 1, tokens=2_000), CANDIDATES, 1.0, 0.0).reason == "moved"
    assert where.decide(prefix(2, 1, tokens=20_000), CANDIDATES, 1.0, 0.0).reason == "prefix"


def test_bound_is_the_last_resort() -> None:
    """A replica far above the mean loses even a session that has everything to lose."""
    where = placement(move_cost=1e9, bound_slack_tokens=100_000)
    where.table.record(prefix(1, 1, tokens=90_000), "a")
    where.ledger.take("x", "a", 90_000, 0.0)
    assert where.decide(prefix(1, 1, tokens=90_000), CANDIDATES, 1.0, 0.0).reason == "prefix"
    where.ledger.take("y", "a", 90_000, 0.0)
    assert where.decide(prefix(1, 1, tokens=90_000), CANDIDATES, 1.0, 0.0).reason == "bound"


def test_moved_session_stays_at_its_new_place() -> None:
    """After a move the new place is as good as the old one: the session does not go back when the load is gone."""
    where = placement()
    home = go(where, prefix(1, 3, tokens=300)).chosen
    where.ledger.take("x", home, 90_000, 0.0)
    moved = go(where, prefix(1, 4, tokens=300))
    where.ledger.release("x")
    assert moved.chosen != home
    assert go(where, prefix(1, 4, tokens=300)).chosen == moved.chosen
    assert go(where, prefix(1, 5, tokens=300)).chosen == moved.chosen


def test_only_candidates_are_chosen() -> None:
    """A replica that is not eligible is not chosen, whatever it holds; its claim comes back with it."""
    where = placement()
    home = go(where, prefix(1, 3)).chosen
    others = [candidate for candidate in CANDIDATES if candidate.name != home]
    assert where.decide(prefix(1, 4), others, 1.0, 0.0).chosen != home
    assert where.decide(prefix(1, 4), CANDIDATES, 1.0, 0.0).chosen == home


def test_weights_share_sessions_and_load() -> None:
    """A replica of weight three gets three quarters of the sessions of two, loaded or not."""
    pair = [Candidate("a", "a", 3.0), Candidate("b", "b", 1.0)]
    for loaded in (False, True):
        where = placement()
        counts: Counter[str] = Counter()
        for session in range(1, 1001):
            decision = go(where, prefix(session, 1), candidates=pair)
            counts[decision.chosen] += 1
            if loaded:
                where.ledger.take(str(session), decision.chosen, 1000, 0.0)
        assert 680 <= counts["a"] <= 820


@given(st.integers(0, 2**64 - 1), st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=8, unique=True))
def test_leaving_replica_moves_only_its_own_keys(key: int, names: list[str]) -> None:
    """Without one name the order of the others is what it was."""
    order = rendezvous_order(key, dict.fromkeys(names, 1.0))
    left = rendezvous_order(key, dict.fromkeys(names[1:], 1.0))
    assert left == [name for name in order if name != names[0]]


def test_table_forgets_the_tail_before_the_head() -> None:
    """A full table loses the deepest prefixes of the oldest request first, and never exceeds its limit."""
    table = PrefixTable(10)
    table.record(prefix(1, 6), "a")
    table.record(prefix(2, 6), "b")
    assert len(table) == 10
    assert table.longest(prefix(1, 6), ["a"]) == {"a": 3}
    assert table.longest(prefix(2, 6), ["b"]) == {"b": 5}


def test_each_key_keeps_its_own_holders_when_a_session_moves() -> None:
    """A third replica takes a session of which two hold parts: both parts are still known, and so is one they share."""
    table = PrefixTable(100)
    for turns, name in ((6, "a"), (2, "b"), (4, "c"), (6, "d")):
        table.record(prefix(1, turns), name)
    assert table.longest(prefix(1, 6), ["a", "b", "c", "d"]) == {"d": 5, "a": 5, "c": 3, "b": 1}


def test_replica_that_came_back_empty_is_forgotten_at_once() -> None:
    """After forget_replica nothing is claimed for the name until it is given something again."""
    table = PrefixTable(100)
    table.record(prefix(1, 3), "a")
    table.forget_replica("a")
    assert table.longest(prefix(1, 3), ["a"]) == {}
    table.record(prefix(1, 2), "a")
    assert table.longest(prefix(1, 3), ["a"]) == {"a": 1}


def test_two_measured_misses_in_a_row_forget_a_session() -> None:
    """One miss is forgiven, a hit in between starts over, two in a row end the claim of that session only."""
    table = PrefixTable(100)
    table.record(prefix(1, 3), "a")
    table.record(prefix(2, 3), "a")
    assert not table.measured(prefix(1, 3), "a", hit=False)
    assert not table.measured(prefix(1, 3), "a", hit=True)
    assert not table.measured(prefix(1, 3), "a", hit=False)
    assert table.longest(prefix(1, 3), ["a"]) == {"a": 2}
    assert table.measured(prefix(1, 3), "a", hit=False)
    assert table.longest(prefix(1, 3), ["a"]) == {}
    assert table.longest(prefix(2, 3), ["a"]) == {"a": 2}


def test_failed_attempt_takes_back_only_what_it_did_not_prefill() -> None:
    """Forgetting beyond an index leaves what was held before."""
    table = PrefixTable(100)
    table.record(prefix(1, 5), "a")
    table.forget(prefix(1, 5), "a", after=2)
    assert table.longest(prefix(1, 5), ["a"]) == {"a": 2}


def test_lease_ends_once() -> None:
    """A lease counts until it is released, expires or is taken again, and is never given back twice."""
    ledger = Ledger(ttl_s=10.0, rate=1000.0)
    ledger.take("x", "a", 500, now=0.0)
    ledger.take("x", "b", 500, now=0.0)
    assert (ledger.load("a").running, ledger.load("b").running) == (0, 1)
    assert ledger.release("x")
    assert not ledger.release("x")
    assert ledger.load("b").running == 0
    assert ledger.load("b").prefill_tokens == 0


def test_lease_that_nobody_ends_expires() -> None:
    """A call whose end no hook reports stops counting after its time, and is counted as expired."""
    ledger = Ledger(ttl_s=10.0, rate=1000.0)
    ledger.take("x", "a", 500, now=0.0)
    ledger.expire(9.9)
    assert ledger.load("a").running == 1
    ledger.expire(10.0)
    assert (ledger.load("a").running, ledger.expired, len(ledger)) == (0, 1, 0)


def test_short_lease_behind_a_long_one_expires_in_its_time() -> None:
    """A pending lease of two seconds does not wait for an older one of ten minutes."""
    ledger = Ledger(ttl_s=600.0, rate=1000.0)
    ledger.take("long", "a", 500, now=0.0)
    ledger.take("short", "b", 500, now=0.0, ttl_s=2.0)
    ledger.expire(3.0)
    assert ledger.load("b").running == 0


def test_first_token_ends_the_prefill_part() -> None:
    """Once an answer begins, its prompt no longer waits; the answer still runs."""
    ledger = Ledger(ttl_s=600.0, rate=1000.0)
    ledger.take("x", "a", 5000, now=0.0)
    ledger.first_token("x", now=2.0)
    assert (ledger.load("a").prefill_tokens, ledger.load("a").running) == (0, 1)
    assert ledger.rate("a") > 1000.0


def test_prefill_of_an_answer_that_does_not_stream_ends_by_rate() -> None:
    """Without a first token to see, the prefill part ends when the server must have done it."""
    ledger = Ledger(ttl_s=600.0, rate=1000.0)
    ledger.take("x", "a", 5000, now=0.0)
    ledger.expire(4.0)
    assert ledger.load("a").prefill_tokens == 5000
    ledger.expire(12.0)
    assert (ledger.load("a").prefill_tokens, ledger.load("a").running) == (0, 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "first", "release", "wait"]), st.integers(0, 6), st.sampled_from("abc")),
        max_size=80,
    )
)
def test_ledger_never_leaks(steps: list[tuple[str, int, str]]) -> None:
    """After any sequence of events, once every lease has ended, no load is left anywhere."""
    ledger = Ledger(ttl_s=50.0, rate=1000.0)
    now = 0.0
    for what, call, server in steps:
        if what == "take":
            ledger.take(str(call), server, 100.0 * (call + 1), now)
        elif what == "first":
            ledger.first_token(str(call), now)
        elif what == "release":
            ledger.release(str(call))
        else:
            now += call
        ledger.expire(now)
        assert sum(ledger.load(name).running for name in "abc") == len(ledger)
    ledger.expire(now + 100.0)
    assert [(ledger.load(name).running, ledger.load(name).prefill_tokens) for name in "abc"] == [(0, 0.0)] * 3


@pytest.mark.parametrize("field", ["polled_waiting", "elsewhere_running", "elsewhere_tokens"])
def test_load_that_others_report_counts(field: str) -> None:
    """Requests waiting by a replica's own metrics, and other workers' leases, push new sessions away."""
    where = placement()
    first = go(placement(), prefix(1, 1)).chosen
    setattr(where.ledger.load(first), field, 50_000)
    assert go(where, prefix(1, 1)).chosen != first


def test_full_pool_with_a_queue_counts() -> None:
    """A replica whose KV pool is full while requests wait gets no new sessions."""
    where = placement()
    first = go(placement(), prefix(1, 1)).chosen
    where.ledger.load(first).pressed = True
    assert go(where, prefix(1, 1)).chosen != first
