"""Checks of a plan against the box it is for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.detect import disks
from kvtier.doctor.box_checks import box_checks, lmcache_check, plugin_check
from kvtier.doctor.checks import Check, failed, judged, passed, warned
from kvtier.doctor.engine_checks import policy
from kvtier.facts import Facts
from kvtier.launch.arguments import split
from kvtier.plan.memory import CPU_POOL
from kvtier.plan.result import Effect, Plan
from kvtier.plan.speculation import APPLIED
from kvtier.units import gib

_SHAPING = {"--max-model-len", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--kv-cache-dtype"}


def before_start(facts: Facts, plan: Plan, environment: Mapping[str, str], users: Sequence[str] = ()) -> list[Check]:
    """Everything that decides whether an engine started from this plan, with the user's own arguments for vLLM, would
    work on this box."""
    # Whether the allocator matters, the plan has decided: it refuses, or brings no connector.
    box = [check for check in box_checks(facts) if check.name != "expandable-segments"]
    checks = [*box, *_decision(plan), *_patches(plan), *_steps(plan)]
    if not plan.serves:
        return checks
    if plan.lmcache_config is not None:
        checks.append(lmcache_check(facts))
    if plan.needs_package:
        checks.append(plugin_check(environment))
    return [
        *checks,
        *_context(plan, environment, users),
        *_shm(facts, plan),
        *_directories(plan),
        policy(plan.vllm_args),
        *_seed(plan, environment),
    ]


def _decision(plan: Plan) -> list[Check]:
    refused = [reason for reason in plan.reasons if reason.effect is Effect.REFUSED]
    fix = next((step.command for step in plan.steps if step.required), None)
    if refused:
        return [failed(reason.rule, reason.sentence, fix) for reason in refused]
    return [
        passed("decision", plan.decision.value),
        *(warned(reason.rule, reason.sentence) for reason in plan.warnings if reason.rule != "spec-decode-on-hybrid"),
    ]


def _patches(plan: Plan) -> list[Check]:
    return [
        judged(
            f"patch {patch.name}",
            patch.state in APPLIED,
            f"{patch.state}: {patch.fixes}",
            f"{patch.state}: {patch.fixes}",
            f"kvtier patch apply {patch.name}   # or kvtier launch --apply-patches",
        )
        for patch in plan.patches
    ]


def _steps(plan: Plan) -> list[Check]:
    return [warned("step", step.why, step.command) for step in plan.steps if plan.serves]


def _context(plan: Plan, environment: Mapping[str, str], users: Sequence[str]) -> list[Check]:
    """Whether one full context fits the pool; on a CPU the environment's own size of the pool goes first.

    What the user says of the length or the pool is passed on as it is, and not judged here.
    """
    if _SHAPING & {name for name, _ in split(users)}:
        return []
    pool = next((tier for tier in plan.tiers if tier.name == "pool"), None)
    if pool is None or not pool.tokens:
        return []
    tokens, planned, own = pool.tokens, plan.env.get(CPU_POOL), environment.get(CPU_POOL, "")
    if planned and own.isdigit():
        tokens = tokens * int(own) // int(planned)
    longest = tokens // 256 * 256
    return [
        judged(
            "context",
            tokens >= plan.max_model_len,
            f"the pool holds {tokens / plan.max_model_len:.2f} contexts of {plan.max_model_len:,} tokens",
            f"the pool holds {tokens:,} tokens, one context takes {plan.max_model_len:,}: vLLM will not start",
            f"--max-model-len {longest}" if longest else f"unset {CPU_POOL}",
        )
    ]


def _shm(facts: Facts, plan: Plan) -> list[Check]:
    ram = next((tier for tier in plan.tiers if tier.name == "ram"), None)
    if ram is None:
        return []
    good = facts.shm_free > ram.bytes
    whole = -(-ram.bytes // (8 << 30)) * 8 + 8
    return [
        judged(
            "shm",
            good or plan.vendor == "amd",
            f"/dev/shm has {gib(facts.shm_free)} free for the tier of {gib(ram.bytes)}",
            f"/dev/shm has only {gib(facts.shm_free)} free, the tier takes {gib(ram.bytes)}",
            f"mount -o remount,size={whole}G /dev/shm",
        )
    ]


def _directories(plan: Plan) -> list[Check]:
    found = []
    for tier in plan.tiers:
        if tier.path is None or (plan.nodes and tier is not next(entry for entry in plan.tiers if entry.path)):
            continue
        path, quoted = Path(tier.path), shlex.quote(tier.path)
        there = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), Path("/"))
        if not there.is_dir():
            found.append(failed("nvme", f"{there} is no directory", "name another directory with --nvme"))
            continue
        probe = disks.takes_o_direct(there)
        note = "" if there == path else f"{tier.path} does not exist yet, launch makes it; "
        if probe is None:
            found.append(
                failed("nvme", f"{note}{there} cannot be written", f"mkdir -p {quoted} && chown $USER {quoted}")
            )
        else:
            shown = tier.path if there == path else str(there)
            found.append(
                judged(
                    "nvme",
                    probe,
                    f"{note}{shown} takes O_DIRECT",
                    f"{note}{shown} refuses O_DIRECT: everything goes through the page cache",
                    "name a directory on ext4 or xfs with --nvme",
                    hard=False,
                )
            )
    return found


def _seed(plan: Plan, environment: Mapping[str, str]) -> list[Check]:
    if plan.env.get("PYTHONHASHSEED") is None:
        return []
    mine = environment.get("PYTHONHASHSEED")
    good = mine is None or mine.isdigit()
    return [
        judged(
            "hash-seed",
            good,
            "PYTHONHASHSEED is fixed",
            f"PYTHONHASHSEED={mine}: a restart would find nothing",
            "export PYTHONHASHSEED=0",
            hard=False,
        )
    ]
