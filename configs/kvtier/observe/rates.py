"""Two looks at an engine: what moved, how fast, and what is bad about it."""

from __future__ import annotations

import msgspec

from kvtier.observe.snapshot import Snapshot
from kvtier.units import count, gib, rate

_FULL = 0.95
_LOW_ACCEPTANCE = 0.4
_LONG_QUEUE_S = 2.0
_LITTLE_DEVICE_MEMORY = 512 << 20


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two looks. Rates are per second; shares are of the tokens in between, None where there
    were none."""

    seconds: float
    prompt_tokens_per_s: float
    generated_per_s: float
    computed_share: float | None
    pool_share: float | None
    tier_share: float | None
    store_rate: float | None
    """Bytes a second while copying (native tiers tell the time), else over the interval."""
    load_rate: float | None
    preemptions: int
    queue_s_mean: float | None
    acceptance: float | None
    """Accepted of drafted tokens."""


def change(before: Snapshot, after: Snapshot) -> Change:
    """What moved between two looks at the same engine; after a restart the counters began anew, so everything
    counts."""
    if after.generated < before.generated or sum(after.tokens.values()) < sum(before.tokens.values()):
        before = _blank(after, before.at)
    seconds = max(after.at - before.at, 1e-9)
    moved = {source: after.tokens[source] - before.tokens[source] for source in after.tokens}
    total = sum(moved.values())
    waits = after.queue_s[1] - before.queue_s[1]
    drafted = after.drafted - before.drafted
    return Change(
        seconds=seconds,
        prompt_tokens_per_s=total / seconds,
        generated_per_s=(after.generated - before.generated) / seconds,
        computed_share=moved["local_compute"] / total if total else None,
        pool_share=moved["local_cache_hit"] / total if total else None,
        tier_share=moved["external_kv_transfer"] / total if total else None,
        store_rate=_rate(after.stored_bytes - before.stored_bytes, after.store_s - before.store_s, seconds),
        load_rate=_rate(after.loaded_bytes - before.loaded_bytes, after.load_s - before.load_s, seconds),
        preemptions=after.preemptions - before.preemptions,
        queue_s_mean=(after.queue_s[0] - before.queue_s[0]) / waits if waits else None,
        acceptance=(after.accepted - before.accepted) / drafted if drafted else None,
    )


def ram_fill(snapshot: Snapshot, tier_bytes: int | None) -> tuple[int, bool] | None:
    """Bytes in the RAM tier, as an upper bound: min(tier, bytes stored since start), and whether the tier's size was
    known.

    vLLM's own gauge counts only what copies pin at the moment, and reads 0.0 on a full tier. None without a native
    tier.
    """
    if not snapshot.native:
        return None
    stored = snapshot.stored_bytes
    return (min(tier_bytes, stored), True) if tier_bytes else (stored, False)


def troubles(snapshot: Snapshot, moved: Change, device_free: int | None = None) -> list[str]:
    """What is bad, in sentences that say what it means."""
    found = []
    if moved.preemptions:
        found.append(
            f"{moved.preemptions} preemptions just now: the working set exceeds the pool, and each preempted prompt "
            "is loaded or prefilled again; fewer seats (--max-num-seqs) help, a tier alone does not"
        )
    if snapshot.waiting.get("capacity"):
        found.append(f"{snapshot.waiting['capacity']} requests wait for capacity: the pool is full of running requests")
    if moved.queue_s_mean is not None and moved.queue_s_mean > _LONG_QUEUE_S:
        found.append(f"requests wait {moved.queue_s_mean:.1f} s before they run")
    if snapshot.degraded:
        found.append("the NVMe tier is degraded: it does not serve; the engine's log says why")
    hit, asked = snapshot.external
    if snapshot.stored_bytes and asked > 50_000 and not hit:
        found.append(
            f"{gib(snapshot.stored_bytes)} stored and nothing served of {count(asked)} tokens looked up: kvtier "
            "acid-test"
        )
    if moved.acceptance is not None and moved.acceptance < _LOW_ACCEPTANCE:
        found.append(f"only {moved.acceptance:.0%} of drafted tokens are accepted: fewer draft tokens may be faster")
    if snapshot.load_failures:
        found.append(
            f"{count(snapshot.load_failures)} loads failed since the start and were computed instead: see the log and "
            "the disk"
        )
    if device_free is not None and device_free < _LITTLE_DEVICE_MEMORY:
        found.append(
            f"{gib(device_free)} of device memory free: a larger batch may fail; lower --gpu-memory-utilization"
        )
    if snapshot.pool_usage > _FULL and not snapshot.waiting.get("capacity"):
        found.append("the pool is nearly full of running requests: the next long one preempts")
    return found


def speed(bytes_per_s: float | None) -> str:
    """A rate for a table."""
    return "-" if not bytes_per_s else rate(bytes_per_s)


def _rate(moved: int, copying_s: float, seconds: float) -> float | None:
    if moved <= 0:
        return None
    return moved / copying_s if copying_s > 0 else moved / seconds


def _blank(like: Snapshot, at: float) -> Snapshot:
    zero = (0, 0)
    return msgspec.structs.replace(
        like,
        at=at,
        tokens=dict.fromkeys(like.tokens, 0),
        cached=dict.fromkeys(like.cached, 0),
        prefix=zero,
        external=zero,
        preemptions=0,
        queue_s=(0.0, 0),
        ttft_s=(0.0, 0),
        generated=0,
        stored_bytes=0,
        loaded_bytes=0,
        store_s=0.0,
        load_s=0.0,
        disk_written_bytes=0,
        disk_read_bytes=0,
        drafted=0,
        accepted=0,
        load_failures=0,
    )
