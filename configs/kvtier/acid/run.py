"""The test itself: cold, repeat, pressure, after it, after a restart; then several long contexts at once."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtier.acid.client import Answer, Target, document
from kvtier.acid.result import Clues, Parallel, Result, Step, judge
from kvtier.observe import snapshot
from kvtier.observe.snapshot import Snapshot
from lmcache_nvme_backend.errors import ConfigError

_DEFAULT_SHARE = 4
"""The document is a quarter of the pool, so that the pressure soon evicts it."""
_PRESSURE_FACTOR = 1.3
"""Pressure beyond the pool: blocks are evicted in order of last use, so the pool's size is enough and a third is
margin."""
_PRESSURE_PIECES = 4
_LEAST_TOKENS = 512
_SETTLE_S, _SETTLE_POLL_S = 20.0, 0.3
"""Stores are written behind the answer, and metrics move with the engine's steps."""
_RESTART_TIMEOUT_S = 900.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask. None: chosen from the pool."""

    tokens: int | None = None
    pressure_tokens: int | None = None
    restart_command: str | None = None
    parallel: int = 3
    """Long contexts at once; 0 leaves that part out."""
    parallel_tokens: int | None = None


def run(target: Target, options: Options, say: Callable[[str], None] = lambda _: None) -> Result:
    """Run the test against an engine.

    Raises:
        ConfigError: the document does not fit the engine's context, or a restart failed.
        RuntimeError: the engine refused a request.
    """
    first = _look(target)
    pool = first.figures.pool_tokens
    tokens = _length(options.tokens, pool, target.context)
    piece = min(_pressure(options.pressure_tokens, pool) // _PRESSURE_PIECES + 1, (target.context or 1 << 30) - 8)
    seed = secrets.randbits(48)
    prompt = document(tokens, seed)
    steps = []
    for name in ("cold", "repeat"):
        say(f"{name}: {tokens:,} tokens …")
        steps.append(_step(target, name, lambda: target.ask(prompt)))
    pressure = _pressure(options.pressure_tokens, pool)
    say(f"pressure: {pressure:,} tokens …")
    steps.append(_step(target, "pressure", lambda: _press(target, pressure, piece, seed)))
    say("after the pressure …")
    steps.append(_step(target, "after-pressure", lambda: target.ask(prompt)))
    last = _look(target)
    if options.restart_command:
        say(f"restart: {options.restart_command} …")
        _restart(target, options.restart_command)
        steps.append(_step(target, "after-restart", lambda: target.ask(prompt)))
        last = _look(target)
    parallel = None
    if options.parallel:
        say(f"{options.parallel} contexts at once …")
        parallel = _at_once(target, options.parallel, options.parallel_tokens or tokens, seed)
    clues = Clues(
        native=last.native,
        plugin=last.plugin,
        degraded=last.degraded,
        drafts=last.drafted > 0 or first.drafted > 0,
        version=target.version(),
        load_failures=last.load_failures,
    )
    verdict, why, causes = judge(steps, clues)
    return Result(
        url=target.url,
        engine=f"vLLM {clues.version}".strip(),
        pool_tokens=pool,
        steps=steps,
        parallel=parallel,
        verdict=verdict,
        why=why,
        likely_causes=causes,
    )


def _length(asked: int | None, pool: int | None, context: int | None) -> int:
    most = (context or 1 << 30) - 8
    if asked is not None:
        if asked > most:
            raise ConfigError(
                "--tokens", str(asked), f"at most {most}, the engine's context less its answer", "Ask for less."
            )
        return asked
    return max(min((pool or 32768) // _DEFAULT_SHARE, most), _LEAST_TOKENS)


def _pressure(asked: int | None, pool: int | None) -> int:
    if asked is not None:
        return asked
    if pool is None:
        raise ConfigError(
            "--pressure-tokens",
            "nothing",
            "more tokens than the pool holds",
            "This engine does not say how large its pool is: give --pressure-tokens from its start-up log.",
        )
    return int(pool * _PRESSURE_FACTOR)


def _look(target: Target) -> Snapshot:
    return snapshot.scrape(target.url, target.http)


def _settled(target: Target) -> Snapshot:
    """The metrics once two looks agree on what has been stored and loaded."""
    end = time.monotonic() + _SETTLE_S
    seen = _look(target)
    while time.monotonic() < end:
        time.sleep(_SETTLE_POLL_S)
        again = _look(target)
        if _moved(again) == _moved(seen) and not again.running:
            return again
        seen = again
    return seen


def _moved(seen: Snapshot) -> tuple[int, ...]:
    return (seen.stored_bytes, seen.loaded_bytes, seen.disk_written_bytes, seen.disk_read_bytes, *seen.tokens.values())


def _step(target: Target, name: str, ask: Callable[[], Answer]) -> Step:
    before = _settled(target)
    answer = ask()
    after = _settled(target)
    moved = {source: after.tokens[source] - before.tokens[source] for source in after.tokens}
    by = {source: after.cached[source] - before.cached[source] for source in after.cached if source != "device"}
    return Step(
        name=name,
        seconds=round(answer.first_token_s, 4),
        prompt_tokens=answer.prompt_tokens,
        computed=moved["local_compute"],
        from_pool=moved["local_cache_hit"],
        from_tier=moved["external_kv_transfer"],
        from_tier_by={key: value for key, value in by.items() if value},
        stored_bytes=after.stored_bytes - before.stored_bytes,
        loaded_bytes=after.loaded_bytes - before.loaded_bytes,
        disk_written_bytes=after.disk_written_bytes - before.disk_written_bytes,
        disk_read_bytes=after.disk_read_bytes - before.disk_read_bytes,
    )


def _press(target: Target, total: int, piece: int, seed: int) -> Answer:
    """Other documents, one after the other, until the pool has seen `total` tokens of them."""
    began, sent, number = time.perf_counter(), 0, 0
    while sent < total:
        number += 1
        length = min(piece, max(total - sent, 16))
        target.ask(document(length, seed + number))
        sent += length
    took = time.perf_counter() - began
    return Answer(took, took, sent)


def _restart(target: Target, command: str) -> None:
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True, timeout=_RESTART_TIMEOUT_S)
    if done.returncode != 0:
        raise ConfigError(
            "--restart-command",
            f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}",
            "a command that ends with 0",
            "Run it by hand.",
        )
    target.wait_until_up(_RESTART_TIMEOUT_S)


def _at_once(target: Target, number: int, tokens: int, seed: int) -> Parallel:
    """`number` different documents at the same time."""
    before = _settled(target)

    def one(index: int) -> Answer | RuntimeError:
        try:
            return target.ask(document(tokens, seed - 1 - index), max_tokens=4)
        except RuntimeError as error:
            return error

    began = time.perf_counter()
    with ThreadPoolExecutor(number) as pool:
        answers = list(pool.map(one, range(number)))
    took = time.perf_counter() - began
    after = _settled(target)
    done = [answer for answer in answers if isinstance(answer, Answer)]
    waits = after.queue_s[1] - before.queue_s[1]
    return Parallel(
        requests=number,
        tokens_each=tokens,
        completed=len(done),
        failed=number - len(done),
        preemptions=after.preemptions - before.preemptions,
        seconds=[round(answer.total_s, 3) for answer in done],
        queue_s_mean=round((after.queue_s[0] - before.queue_s[0]) / waits, 3) if waits else None,
        prefill_tokens_per_s=round(sum(answer.prompt_tokens for answer in done) / took, 1),
    )
