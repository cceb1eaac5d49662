"""Checks of a running engine, from its metrics and, where it runs on this host, its command line."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.doctor.checks import Check, failed, judged, passed, warned
from kvtier.facts import Facts
from kvtier.launch.arguments import split, transfer_config
from kvtier.observe.snapshot import Snapshot
from kvtier.plan.advice import advise, remarks
from kvtier.units import count, gib

_ENOUGH_TOKENS = 20_000
"""External lookups below this say nothing about whether a tier serves."""


def running(snapshot: Snapshot, facts: Facts, url: str, typical_tokens: int | None = None) -> list[Check]:
    """What a running engine shows of its tier and its pool."""
    return [
        passed("engine", "; ".join(remarks(snapshot.figures)) or "it answers"),
        *_tier(snapshot),
        _serving(snapshot),
        *_loads(snapshot),
        _preemptions(snapshot),
        policy(command_line(url)),
        *_advice(snapshot, facts, typical_tokens),
    ]


def command_line(url: str, proc: Path = Path("/proc")) -> list[str] | None:
    """The words that the server at `url` was started with, where it runs on this host and can be seen; else None."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(parts.hostname or ""):
        return None
    wanted = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    for process in proc.iterdir():
        if process.name.isdigit() and wanted and _holds(process, wanted):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any("vllm" in word for word in words):
                return [word for word in words if word]
    return None


def policy(words: list[str] | None) -> Check:
    """The failure policy in a command line."""
    if words is None:
        return warned(
            "load-failure-policy",
            "the engine's command line cannot be seen from here: see that its --kv-transfer-config holds "
            '"kv_load_failure_policy":"recompute"',
        )
    flags = dict(split(words))
    try:
        config = transfer_config(words)
    except (ValueError, AttributeError, TypeError):
        return warned("load-failure-policy", "--kv-transfer-config cannot be read")
    if "--kv-offloading-size" in flags and (config or {}).get("kv_load_failure_policy") != "recompute":
        if (flags.get("--kv-offloading-backend") or ("native",))[0] == "native":
            return passed(
                "load-failure-policy",
                "fail, the default: --kv-offloading-size configures vLLM's own connector so; its copies from host RAM "
                "report no failed load, so that no request dies of one",
            )
        config = config or {}
    if config is None:
        return passed("load-failure-policy", "no connector is configured that could fail a load")
    return judged(
        "load-failure-policy",
        config.get("kv_load_failure_policy") == "recompute",
        "recompute",
        "fail (the default): a request whose KV cannot be loaded dies",
        'put "kv_load_failure_policy":"recompute" in --kv-transfer-config',
    )


def _tier(snapshot: Snapshot) -> list[Check]:
    if snapshot.degraded:
        return [
            failed(
                "tier",
                "the NVMe tier is configured and degraded: it does not serve",
                "see the engine's log for the reason, mend it, restart",
            )
        ]
    if snapshot.plugin:
        fill = (
            ""
            if snapshot.used_bytes is None or not snapshot.quota_bytes
            else f", {gib(snapshot.used_bytes)} of {gib(snapshot.quota_bytes)} used"
        )
        return [passed("tier", f"this project's NVMe tier is registered{fill}")]
    if snapshot.native:
        return [passed("tier", "vLLM's offload is registered")]
    if snapshot.from_tier or snapshot.external[0]:
        return [passed("tier", "a connector serves tokens (it exports no metrics of its own here)")]
    return [
        failed(
            "tier",
            "no tier shows in the engine's metrics (LMCache in degraded mode serves without any and does not fail)",
            'kvtier plan MODEL; and look for "degraded mode" in the log',
        )
    ]


def _serving(snapshot: Snapshot) -> Check:
    hit, asked = snapshot.external
    if hit or snapshot.from_tier:
        return passed(
            "hits", f"the tier served {count(max(hit, snapshot.from_tier))} tokens of {count(asked)} looked up"
        )
    if asked < _ENOUGH_TOKENS:
        return warned(
            "hits", f"too little traffic to tell: {count(asked)} tokens looked up", "kvtier acid-test --url URL"
        )
    if snapshot.stored_bytes:
        return failed(
            "hits",
            f"it stored {gib(snapshot.stored_bytes)} and never served: of {count(asked)} tokens looked up, none",
            "kvtier patch status; PYTHONHASHSEED=0; kvtier acid-test --url URL",
        )
    return warned(
        "hits",
        f"of {count(asked)} tokens looked up none was found, and nothing is stored",
        "kvtier acid-test --url URL",
    )


def _loads(snapshot: Snapshot) -> list[Check]:
    if not snapshot.load_failures:
        return []
    return [
        warned(
            "load-failures",
            f"{count(snapshot.load_failures)} loads failed and were computed instead",
            "see the engine's log, and the disk's",
        )
    ]


def _preemptions(snapshot: Snapshot) -> Check:
    done = snapshot.preemptions
    return judged(
        "preemptions",
        done <= 1,
        f"{done}",
        f"{count(done)}: the working set is larger than the pool",
        "fewer seats: --max-num-seqs (see the advice below)",
        hard=False,
    )


def _advice(snapshot: Snapshot, facts: Facts, typical_tokens: int | None) -> list[Check]:
    return [
        warned("flags", f"{entry.flag} {entry.honest} (is {entry.found}): {entry.why}")
        if entry.found != "not said"
        else passed("flags", f"{entry.flag} {entry.honest} would be honest: {entry.why}")
        for entry in advise(snapshot.figures, facts, typical_tokens)
        if not entry.right
    ]


def _is_here(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def _listening(port: int, proc: Path) -> set[str]:
    """Inodes of the sockets that listen on a port, from /proc/net/tcp and tcp6 (state 0A)."""
    found = set()
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and re.search(rf":{port:04X}$", fields[1]):
                found.add(fields[9])
    return found


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        return any(str(entry.readlink()) in wanted for entry in (process / "fd").iterdir())
    except OSError:
        return False
