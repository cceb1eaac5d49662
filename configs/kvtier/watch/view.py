"""Snapshots as a rich renderable. Pure: nothing here asks the network or the clock."""

from __future__ import annotations

import msgspec
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvtier.observe.rates import Change, ram_fill, speed, troubles
from kvtier.observe.snapshot import Snapshot
from kvtier.units import count, gib


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one moment; `error` instead where it did not answer."""

    url: str
    snapshot: Snapshot | None = None
    change: Change | None = None
    error: str | None = None
    ram_tier_bytes: int | None = None
    device_free: int | None = None


def render(engines: list[Seen]) -> Group:
    """One panel an engine."""
    return Group(*(_panel(engine) for engine in engines))


def rows(engine: Seen) -> list[tuple[str, str]]:
    """The lines of one engine's panel, as label and text."""
    snapshot, moved = engine.snapshot, engine.change
    if snapshot is None or moved is None:
        return []
    figures = snapshot.figures
    size = f" of {count(figures.pool_tokens)} tokens" if figures.pool_tokens else ""
    found = [
        ("pool", f"{snapshot.pool_usage:.0%}{size} in use, {snapshot.running} running"),
        ("waiting", ", ".join(f"{number} {reason}" for reason, number in snapshot.waiting.items()) or "0"),
        (
            "prompt tokens",
            f"{moved.prompt_tokens_per_s:,.0f}/s: computed {_share(moved.computed_share)}, pool "
            f"{_share(moved.pool_share)}, tier {_share(moved.tier_share)}",
        ),
        (
            "since start",
            f"computed {count(snapshot.tokens['local_compute'])}, pool {count(snapshot.tokens['local_cache_hit'])}, "
            f"tier {count(snapshot.tokens['external_kv_transfer'])}{_by_tier(snapshot)}",
        ),
        ("hit ratio", f"pool {_ratio(snapshot.prefix)}, tier {_ratio(snapshot.external)}"),
        ("copies", f"to the tier {speed(moved.store_rate)}, back {speed(moved.load_rate)}"),
        ("generated", f"{moved.generated_per_s:,.1f} tokens/s"),
        ("preemptions", f"{snapshot.preemptions} since start, {moved.preemptions} just now"),
    ]
    fill = ram_fill(snapshot, engine.ram_tier_bytes)
    if fill:
        known = f" of {gib(engine.ram_tier_bytes or 0)}" if fill[1] else ""
        found.append(
            (
                "RAM tier",
                f"at most {gib(fill[0])}{known} (upper bound: stored since start; the engine's gauge shows only "
                "copies in flight)",
            )
        )
    if snapshot.used_bytes is not None and snapshot.quota_bytes:
        found.append(("NVMe tier", f"{gib(snapshot.used_bytes)} of {gib(snapshot.quota_bytes)} (whole host)"))
    elif snapshot.disk_written_bytes:
        found.append(("NVMe tier", f"at most {gib(snapshot.disk_written_bytes)} (upper bound: written since start)"))
    if moved.acceptance is not None:
        found.append(("drafts", f"{moved.acceptance:.0%} accepted"))
    if engine.device_free is not None:
        found.append(("device", f"{gib(engine.device_free)} free"))
    return found


def _panel(engine: Seen) -> Panel:
    if engine.snapshot is None or engine.change is None:
        return Panel(Text(engine.error or "looking …", style="red" if engine.error else "dim"), title=engine.url)
    table = Table(show_header=False, box=None, padding=(0, 1))
    for label, text in rows(engine):
        table.add_row(Text(label, style="bold"), Text(text))
    bad = [Text(f"! {text}", style="yellow") for text in troubles(engine.snapshot, engine.change, engine.device_free)]
    return Panel(Group(table, *bad), title=engine.url, border_style="yellow" if bad else "green")


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ratio(pair: tuple[int, int]) -> str:
    hit, asked = pair
    return f"{hit / asked:.0%} ({count(hit)} of {count(asked)})" if asked else "-"


def _by_tier(snapshot: Snapshot) -> str:
    parts = [f"{source} {count(number)}" for source, number in snapshot.cached.items() if number and source != "device"]
    return f" ({', '.join(parts)})" if parts else ""
