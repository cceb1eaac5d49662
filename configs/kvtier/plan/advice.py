"""Advice with numbers: which flags are honest for the pool that an engine really got."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec

from kvtier.detect.memory import main_devices
from kvtier.facts import Facts, Memory
from kvtier.units import GIB, count, gib
from lmcache_nvme_backend.errors import ConfigError

_LEFT_FREE = int(1.75 * GIB)
"""Of the device's memory: the driver, other processes' contexts and the allocator's growth under load."""
_UTILIZATION_MOST = 0.95
_TYPICAL_SHARE = 4
"""A usual request takes a quarter of the longest context: more seats than pool / that only preempt each other."""
_FEW_SEATS = 8
_LARGE_DEVICE = 24 * GIB
_LARGE_STEP, _SMALL_STEP = 16384, 8192
_PREEMPTIONS_BAD = 1


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine said of itself, in a start-up log or in its metrics. None where it did not say."""

    source: str
    pool_tokens: int | None = None
    max_concurrency: float | None = None
    context: int | None = None
    kv_memory_bytes: int | None = None
    preemptions: int | None = None
    waiting_for_capacity: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One flag: what it is, what is honest, and why."""

    flag: str
    found: str
    honest: str
    right: bool
    """Whether what was found is what is honest."""
    why: str


_POOL = re.compile(r"(?:GPU|XPU|CPU|TPU|HPU)(?: \+ host)? KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_MEMORY = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_ARGS = re.compile(r"non-default args: (\{.*\})")


def from_log(path: Path) -> EngineFigures:
    """Figures from vLLM's start-up log (one line since 0.28, two before).

    Raises:
        ConfigError: the file cannot be read, or holds no line about the KV pool.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(
            "--log", f"{path} ({error.strerror})", "a readable file", "Give vLLM's start-up log."
        ) from error
    figures = from_log_text(text, str(path))
    if figures.pool_tokens is None:
        raise ConfigError(
            "--log",
            f"{path} without a 'KV cache size' line",
            "vLLM's start-up log",
            "Take the log from the start of the engine, at level INFO.",
        )
    return figures


def from_log_text(text: str, source: str) -> EngineFigures:
    """As `from_log`, from text; a line that is missing leaves its figures None. The last start in the log counts."""
    pool, concurrency, memory = (_last(pattern, text) for pattern in (_POOL, _CONCURRENCY, _MEMORY))
    arguments = _arguments(text)
    return EngineFigures(
        source=source,
        pool_tokens=_int(pool[1]) if pool else None,
        context=_int(concurrency[1]) if concurrency else None,
        max_concurrency=float(concurrency[2]) if concurrency else None,
        kv_memory_bytes=int(float(memory[1]) * GIB) if memory else None,
        gpu_memory_utilization=arguments.get("gpu_memory_utilization"),
        max_num_seqs=arguments.get("max_num_seqs"),
        max_num_batched_tokens=arguments.get("max_num_batched_tokens"),
    )


def advise(figures: EngineFigures, facts: Facts, typical_tokens: int | None = None) -> list[Advice]:
    """Which of the three flags that shape the pool are honest for the figures; a flag is left out where the figures
    do not tell."""
    wanted: list[tuple[str, Any, Any, str]] = []
    device = main_devices(facts.devices)[0] if facts.devices else None
    size = device.memory_bytes if device else None
    if facts.memory is Memory.DISCRETE and size:
        share = min(int((size - _LEFT_FREE) * 100 / size) / 100, _UTILIZATION_MOST)
        wanted.append(
            (
                "--gpu-memory-utilization",
                figures.gpu_memory_utilization,
                share,
                f"a reservation at start, not a dial: all but {gib(_LEFT_FREE)} of the device's {gib(size)}",
            )
        )
    if figures.pool_tokens:
        seats = seats_for(figures.pool_tokens, figures.context, typical_tokens)
        usual = typical_tokens or (figures.context or figures.pool_tokens) // _TYPICAL_SHARE
        wanted.append(
            (
                "--max-num-seqs",
                figures.max_num_seqs,
                seats,
                f"a pool of {count(figures.pool_tokens)} tokens holds {seats} requests of {count(usual)}; more seats "
                "only preempt each other, and a preempted prompt is prefilled again",
            )
        )
        if seats <= _FEW_SEATS and size and size >= _LARGE_DEVICE:
            wanted.append(
                (
                    "--max-num-batched-tokens",
                    figures.max_num_batched_tokens,
                    _LARGE_STEP,
                    "few seats leave room in a step: larger prefill steps, at the cost of some activation memory",
                )
            )
        elif seats > _FEW_SEATS:
            wanted.append(
                (
                    "--max-num-batched-tokens",
                    figures.max_num_batched_tokens,
                    _SMALL_STEP,
                    "many seats: a larger prefill step would hold up their decoding",
                )
            )
    return [
        Advice(
            flag=flag,
            found="not said" if found is None else str(found),
            honest=str(honest),
            right=found == honest,
            why=why,
        )
        for flag, found, honest, why in wanted
    ]


def seats_for(pool_tokens: int, context: int | None, typical_tokens: int | None) -> int:
    """Requests of usual length that a pool holds, at least one."""
    usual = typical_tokens or (context or pool_tokens) // _TYPICAL_SHARE
    return max(1, pool_tokens // max(usual, 1))


def remarks(figures: EngineFigures) -> list[str]:
    """What the figures mean, for a person."""
    said = []
    if figures.pool_tokens:
        line = f"pool: {count(figures.pool_tokens)} tokens"
        if figures.kv_memory_bytes:
            line += f" in {gib(figures.kv_memory_bytes)}"
        if figures.max_concurrency is not None and figures.context:
            line += f", {figures.max_concurrency:.2f} contexts of {count(figures.context)}"
        said.append(line)
    if figures.max_concurrency is not None and figures.max_concurrency < 1:
        said.append("one full context does not fit: requests that long are refused or preempted for ever")
    if figures.preemptions is not None and figures.preemptions > _PREEMPTIONS_BAD:
        said.append(
            f"{count(figures.preemptions)} preemptions: the working set is larger than the pool; a tier extends the "
            "cache, not the working set: fewer seats first"
        )
    if figures.waiting_for_capacity:
        said.append(f"{figures.waiting_for_capacity} requests wait for capacity: the pool is full")
    return said


def _arguments(text: str) -> dict[str, Any]:
    match = _last(_ARGS, text)
    if not match:
        return {}
    try:
        found = ast.literal_eval(match[1])
    except (ValueError, SyntaxError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed(list(pattern.finditer(text))), None)


def _int(text: str) -> int:
    return int(text.replace(",", ""))
