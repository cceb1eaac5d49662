"""What a demo run measured, whether that is what it should be, and how it is shown."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvtier.doors import CHUNK_TOKENS, Door
from kvtier.process import IoCounters

_WITHOUT_POOL: Final[tuple[Door, ...]] = ("plugin", "native")
_POOL: Final[dict[Door, str]] = {
    "plugin": "LMCache's CPU pool",
    "native": "CPU pool",
    "tier": "vLLM's host tier",
    "mp": "LMCache's L1 pool",
}
# The share of the prompt that a restarted engine has to take from NVMe; what is missing is the tail below one chunk.
REQUIRED_SHARE = 0.95


class Step(msgspec.Struct, frozen=True):
    """One asking of the prompt. Tokens are vLLM's counts by source, bytes the kernel's counts for the engine."""

    name: Literal["cold", "repeat", "restart"]
    ttft_s: float
    prompt_tokens: int
    tokens_computed: int
    tokens_from_pool: int
    tokens_from_nvme: int
    bytes_read: int
    bytes_written: int
    text: str


class Report(msgspec.Struct, frozen=True):
    """A whole run. `lmcache_cpu_pool_bytes` is the host memory of whatever cache lies in front of NVMe: LMCache's, or
    vLLM's own host tier."""

    steps: list[Step]
    lmcache_cpu_pool_bytes: int
    staging_bytes: int
    nvme_bytes_written: int
    nvme_bytes_read: int
    chunks_dropped: int
    chunks_corrupt: int
    door: Door = "plugin"

    def step(self, name: str) -> Step:
        """The step of that name; KeyError where the run has none."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def to_json(self) -> bytes:
        """What `kvtier demo --json` writes; programs read it, so its shape stays."""
        step_keys = ("name", "ttft_s", "prompt_tokens", "tokens_computed", "tokens_from_nvme", "text")
        keys = ("lmcache_cpu_pool_bytes", "staging_bytes", "nvme_bytes_written", "nvme_bytes_read", "chunks_dropped")
        shape = {"steps": [{key: getattr(step, key) for key in step_keys} for step in self.steps]}
        shape |= {key: getattr(self, key) for key in keys}
        return msgspec.json.format(msgspec.json.encode(shape), indent=2) + b"\n"

    def faults(self) -> list[str]:
        """What is not as it should be, a sentence each; empty for a good run.

        Times are shown and not judged here: another program on the machine must not fail a demo.
        """
        cold, restart = self.step("cold"), self.step("restart")
        faults = []
        wanted = required_tokens(restart.prompt_tokens)
        if restart.tokens_from_nvme < wanted:
            faults.append(
                f"After the restart {restart.tokens_from_nvme} of {restart.prompt_tokens} prompt tokens came from "
                f"NVMe; {wanted} should have."
            )
        if cold.tokens_from_nvme:
            faults.append(
                f"The cold step already found {cold.tokens_from_nvme} tokens on NVMe, so it was not cold: "
                "give it an empty folder."
            )
        faults += [
            f"The text of step {step.name} differs from the cold one's: {step.text!r} and {cold.text!r}."
            for step in self.steps
            if step.text != cold.text
        ]
        if self.chunks_dropped:
            faults.append(f"{self.chunks_dropped} chunks were dropped instead of stored.")
        if self.chunks_corrupt:
            faults.append(f"{self.chunks_corrupt} chunks were damaged on their way to the disk and back.")
        if self.lmcache_cpu_pool_bytes and self.door in _WITHOUT_POOL:
            faults.append(f"A CPU pool is held, of {human_bytes(self.lmcache_cpu_pool_bytes)}.")
        return faults


def required_tokens(prompt_tokens: int) -> int:
    """How many of the prompt's tokens must come from NVMe: 95 %, or every whole chunk where that is less.

    The last token is always computed, so a prompt of exactly n chunks has n - 1 that can be loaded in whole.
    """
    whole_chunks = (prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    return min(whole_chunks, int(REQUIRED_SHARE * prompt_tokens + 0.5))


def human_bytes(count: int) -> str:
    """Binary units, as `du -h` counts."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def show(report: Report, console: Console) -> None:
    """Print the table, what lies under it, the answer, and the verdict."""
    cold = report.step("cold")
    # Narrow enough for the 80 columns that a log has.
    table = Table(
        title=f"The same prompt of {cold.prompt_tokens} tokens, three times", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("step", no_wrap=True)
    for heading in ("first\ntoken", "tokens\ncomputed", "from\nKV pool", "from\nNVMe", "bytes\nread", "\nwritten"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same\ntext", justify="right", no_wrap=True)
    for step in report.steps:
        table.add_row(
            step.name,
            f"{step.ttft_s:.2f} s",
            str(step.tokens_computed),
            str(step.tokens_from_pool),
            str(step.tokens_from_nvme),
            human_bytes(step.bytes_read),
            human_bytes(step.bytes_written),
            "—" if step is cold else "yes" if step.text == cold.text else "NO",
        )
    restart = report.step("restart")
    below = Text(
        f"{_POOL[report.door]}: {human_bytes(report.lmcache_cpu_pool_bytes)}; "
        f"staging: {human_bytes(report.staging_bytes)}; chunks dropped: {report.chunks_dropped}\n"
        f"The answer: {cold.text.strip()}"
    )
    console.print(Group(table, below), soft_wrap=True)
    if faults := report.faults():
        for fault in faults:
            console.print(Text(f"✗ {fault}", style="bold red"))
    else:
        console.print(
            Text(
                f"✓ {restart.tokens_from_nvme / restart.prompt_tokens:.0%} of the prompt survived the restart; "
                f"the first token came after {restart.ttft_s / cold.ttft_s:.3f} of the cold time.",
                style="bold green",
            )
        )


def total_io(steps: list[Step]) -> IoCounters:
    """The bytes of all steps together."""
    return IoCounters(sum(step.bytes_read for step in steps), sum(step.bytes_written for step in steps))
