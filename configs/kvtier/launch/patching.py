"""Upstream fixes that a plan needs, applied to the installed vLLM by kvpatches."""

from __future__ import annotations

import msgspec

from kvtier.detect import software
from kvtier.facts import Facts
from kvtier.plan.result import Plan
from kvtier.plan.speculation import APPLIED
from lmcache_nvme_backend.errors import ConfigError


def apply_needed(plan: Plan, facts: Facts) -> tuple[Facts, list[str]]:
    """Apply what the plan needs and the installed vLLM lacks; the facts as they are then, and what was done in words.

    Raises:
        ConfigError: kvpatches is not installed, or does not know this vLLM's code (nothing has been changed then).
    """
    if not plan.patches:
        return facts, []
    try:
        import kvpatches
    except ImportError as error:
        raise ConfigError(
            "--apply-patches", "no kvpatches", "the kvpatches of this project", "Install lmcache-nvme-backend."
        ) from error
    states = software.patch_states()
    needed = [patch.name for patch in plan.patches if states.get(patch.name) not in APPLIED]
    try:
        outcomes = kvpatches.apply(needed) if needed else []
    except kvpatches.ConfigError as error:
        raise ConfigError(error.setting, error.found, error.allowed, error.todo) from error
    said = [f"patched {done.file}: {', '.join(done.patches)}" for done in outcomes if done.changed]
    return msgspec.structs.replace(facts, patches=software.patch_states()), said
