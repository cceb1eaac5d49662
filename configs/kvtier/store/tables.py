"""What ``kvtier store`` shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from kvtier.store import words
from kvtier.units import count
from lmcache_nvme_backend.store.guest import Removed
from lmcache_nvme_backend.store.pruning import Plan
from lmcache_nvme_backend.store.survey import Ledgers, Part, Survey
from lmcache_nvme_backend.store.verification import Verification

_SHORT = 12
_SHOWN = 20  # faults that are listed; the rest is in the JSON
_TIERS = {"nvme": "this project's NVMe tier", "vllm-fs": "vLLM's own fs tier"}


def show_survey(survey: Survey, console: Console) -> None:
    """Each part in a few lines, the most recently used first, then the sums."""
    console.print(f"{survey.root}: {_TIERS[survey.layout]}", style="bold", markup=False, highlight=False)
    for part in sorted(survey.parts, key=lambda part: -(part.used_ns or 0)):
        _show_head(survey, part, console)
        other = f", and {words.size(part.other_bytes)} of other files" if part.other_bytes else ""
        console.print(
            f"    {words.size(part.nbytes)} in {count(part.chunks)} chunks{other}; last used "
            f"{words.ago(part.used_ns, survey.taken_ns)}",
            highlight=False,
        )
        if part.chunks:
            console.print(f"    used within: {words.recency(part.recency)}", highlight=False)
    console.print()
    for sentence in _sums(survey):
        console.print(sentence, markup=False, highlight=False)


def _show_head(survey: Survey, part: Part, console: Console) -> None:
    """Name, state and facts of a part. An engine's namespace is found by the first digits of its digest."""
    name = part.name[:_SHORT] if survey.layout == "nvme" else part.name
    colour = "green" if part.open_by else "yellow" if part.stale else "dim"
    state = f" [{colour}]{escape(words.state(part))}[/]" if survey.layout == "nvme" or part.stale else ""
    console.print(f"\n  {escape(name)} [bold]{escape(words.title(part))}[/]{state}", highlight=False)
    details = words.details(part)
    if details:
        console.print(f"    {details}", markup=False, highlight=False)


def _sums(survey: Survey) -> list[str]:
    chunks = sum(part.chunks for part in survey.parts)
    found = [f"In all {words.size(survey.nbytes)} in {count(chunks)} chunks."]
    stale = [part for part in survey.parts if part.stale]
    if stale:
        held = words.size(sum(part.nbytes for part in stale))
        found.append(
            f"Stale: {len(stale)} of {len(survey.parts)}, {held}. `kvtier store prune ROOT --stale` shows them."
        )
    if survey.temporaries:
        found.append(f"Being written, or left by a crash: {survey.temporaries}, {words.size(survey.temporary_bytes)}.")
    if survey.foreign_bytes:
        counted = " They count against the quota." if survey.ledgers else ""
        found.append(f"Other files under the root: {words.size(survey.foreign_bytes)}.{counted}")
    if survey.ledgers:
        found += _account(survey.ledgers)
    else:
        found.append("This tier has no quota and never removes a block: `kvtier store prune` does.")
    if not survey.reads_count_as_use:
        found.append("The file system keeps no read times (noatime): `last used` is when a block was written.")
    return found


def _account(ledgers: Ledgers) -> list[str]:
    quotas = " and ".join(words.size(quota) for quota in ledgers.quotas)
    quota = f"Quota: {quotas}." if quotas else "Quota: not known, since no engine has the root open."
    if len(ledgers.quotas) > 1:
        quota += " The engines were given different ones: each keeps its own."
    if ledgers.account_used_after is None:
        return [quota, "The account cannot be read; the next engine that starts counts the files again."]
    used = ledgers.account_used_after
    difference = ledgers.found - used
    if ledgers.unfinished:
        verdict = "somebody was changing it just then, or died doing so; the next who needs it counts again"
    elif ledgers.account_used != used:
        verdict = "an engine was storing or evicting meanwhile"
    elif difference == 0:
        verdict = "as it should be"
    else:
        more = "more" if difference > 0 else "less"
        verdict = (
            f"{words.size(abs(difference))} {more} than accounted for: files have come or gone by hand. "
            "The next engine that starts alone counts again"
        )
    reserved = f", {words.size(ledgers.account_reserved)} reserved" if ledgers.account_reserved else ""
    return [quota, f"Account: {words.size(used)}{reserved}; found on disk: {words.size(ledgers.found)}: {verdict}."]


def show_verification(found: Verification, seconds: float, console: Console) -> None:
    """What is bad, a line each, and the sum."""
    for fault in found.bad[:_SHOWN]:
        fate = "removed" if fault.removed else "bad"
        console.print(f"[red]{fate}[/] {escape(fault.cause)}: {escape(fault.path)}", highlight=False)
    if len(found.bad) > _SHOWN:
        console.print(f"… and {len(found.bad) - _SHOWN} more", highlight=False)
    for fault in found.unreadable[:_SHOWN]:
        console.print(f"[red]not read[/] {escape(fault.cause)}: {escape(fault.path)}", highlight=False)
    for stray in found.strays[:_SHOWN]:
        console.print(f"[yellow]no chunk[/] nobody reads it, but it counts: {escape(stray)}", highlight=False)
    if found.gone:
        console.print(f"{count(found.gone)} chunks were evicted before their turn.", highlight=False)
    mode = "direct I/O" if found.direct_io else "buffered, and dropped from the page cache"
    console.print(
        f"{count(found.chunks)} chunks are good: {words.size(found.nbytes)} in {seconds:.1f} s, "
        f"{words.size(int(found.nbytes / max(seconds, 1e-9)))}/s ({mode}).",
        highlight=False,
    )
    if found.sound:
        console.print("[green]Nothing is bad.[/]")
        return
    removed = sum(fault.removed for fault in found.bad)
    console.print(
        f"[bold red]{count(len(found.bad))} bad, of which {count(removed)} were removed; "
        f"{count(len(found.unreadable))} could not be read.[/] An engine takes each for a miss.",
        highlight=False,
    )


def show_plan(plans: Sequence[Plan], console: Console) -> None:
    """What would go of each part, and what stays."""
    for plan in plans:
        if not plan.choices:
            continue
        console.print(f"{plan.survey.root}: {_TIERS[plan.survey.layout]}", style="bold", markup=False, highlight=False)
        for choice in plan.choices:
            _show_head(plan.survey, choice.part, console)
            console.print(
                f"    to go: {words.size(choice.nbytes)} of {words.size(choice.part.nbytes)}, "
                f"{count(len(choice.files))} chunks; last used {words.ago(choice.part.used_ns, plan.survey.taken_ns)}",
                highlight=False,
            )
        console.print(
            f"\n{count(plan.chunks)} chunks, {words.size(plan.nbytes)}, would go; "
            f"{words.size(plan.survey.nbytes - plan.nbytes)} would stay.",
            highlight=False,
        )


def show_removed(done: Removed, console: Console) -> None:
    console.print(f"Removed {count(done.chunks)} chunks, {words.size(done.nbytes)}.", highlight=False)
    if done.spared:
        console.print(f"{count(done.spared)} stayed: they were used, or opened, meanwhile.", highlight=False)
    if done.gone:
        console.print(f"{count(done.gone)} had gone before.", highlight=False)
    if done.failed:
        console.print(f"[bold red]{count(done.failed)} could not be removed.[/]", highlight=False)
