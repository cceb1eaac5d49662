"""What vLLM's command line says of KV transfer, for the front process, which has not parsed it yet."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

_OPTION = "--kv-transfer-config"


def transfer_config(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The dictionary given as ``--kv-transfer-config``; empty where there is none, or none that can be read."""
    arguments = sys.argv if arguments is None else arguments
    for position, argument in enumerate(arguments):
        name, _, inline = argument.partition("=")
        if name.replace("_", "-") == _OPTION:
            text = inline or (arguments[position + 1] if position + 1 < len(arguments) else "")
            try:
                found = json.loads(text)
            except json.JSONDecodeError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def connector_extra(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Its ``kv_connector_extra_config``."""
    extra = transfer_config(arguments).get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def secondary_tiers(class_name: str, arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The entries of ``secondary_tiers`` that name this class of this package."""
    tiers = connector_extra(arguments).get("secondary_tiers")
    return [
        tier
        for tier in (tiers if isinstance(tiers, list) else [])
        if isinstance(tier, dict)
        and (tier.get("type"), tier.get("module_path")) == (class_name, "lmcache_nvme_backend")
    ]
