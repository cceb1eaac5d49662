"""Checks of a plan against the box it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtier.detect import disks
from kvtier.doctor.box_checks import box_checks, lmcache_check, plugin_check
from kvtier.doctor.checks import Check, failed, judged, passed, warned
from kvtier.facts import Facts
from kvtier.plan.result import Effect, Plan
from kvtier.plan.speculation import APPLIED
from kvtier.units import gib


def before_start(facts: Facts, plan: Plan, environment: Mapping[str, str]) -> list[Check]:
    """Everything that decides whether an engine started from this plan would work on this box."""
    checks = [*box_checks(facts), *_decision(plan), *_patches(plan), *_steps(plan)]
    if not plan.serves:
        return checks
    if plan.lmcache_config is not None:
        checks += [lmcache_check(facts), plugin_check(environment)]
    return [*checks, *_shm(facts, plan), *_directories(plan), *_policy(plan), *_seed(plan, environment)]


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
        there = next((folder for folder in (Path(tier.path), *Path(tier.path).parents) if folder.is_dir()), Path("/"))
        probe = disks.takes_o_direct(there)
        if probe is None:
            found.append(
                failed("nvme", f"{there} cannot be written", f"mkdir -p {tier.path} && chown $USER {tier.path}")
            )
        else:
            found.append(
                judged(
                    "nvme",
                    probe,
                    f"{tier.path} takes O_DIRECT",
                    f"{tier.path} refuses O_DIRECT: everything goes through the page cache",
                    "name a directory on ext4 or xfs with --nvme",
                    hard=False,
                )
            )
    return found


def _policy(plan: Plan) -> list[Check]:
    if "--kv-transfer-config" not in plan.vllm_args:
        return []
    good = '"kv_load_failure_policy":"recompute"' in plan.vllm_args[plan.vllm_args.index("--kv-transfer-config") + 1]
    return [
        judged(
            "load-failure-policy",
            good,
            "recompute: a failed load costs time, not the request",
            "a failed load ends the request",
        )
    ]


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
