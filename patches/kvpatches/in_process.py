"""What this stack carries inside the process: adaptations of LMCache that change no file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvpatches.judge import State

# Module with a function `adaptations() -> list of dicts with id, title, state, detail`. Imported only when asked for.
PROVIDERS = ("lmcache_nvme_backend.doors.lmcache_compat",)


@dataclass(frozen=True)
class Adaptation:
    """One in-process adaptation, judged by its own provider against the installed code."""

    id: str
    title: str
    state: State
    detail: str
    provider: str


def adaptations() -> list[Adaptation]:
    """All adaptations of the providers that are installed. Never raises: a provider that fails is one row."""
    return [row for provider in PROVIDERS for row in _of(provider)]


def _of(provider: str) -> list[Adaptation]:
    try:
        module = importlib.import_module(provider)
        ask = cast("Callable[[], list[Mapping[str, Any]]]", module.adaptations)
        return [_row(provider, raw) for raw in ask()]
    except ModuleNotFoundError as err:
        if err.name is not None and (provider == err.name or provider.startswith(err.name + ".")):
            return []
        return [_failed(provider, err)]
    except Exception as err:
        return [_failed(provider, err)]


def _row(provider: str, raw: Mapping[str, Any]) -> Adaptation:
    state, detail = str(raw["state"]), str(raw.get("detail", ""))
    if state not in {s.value for s in State}:
        detail, state = f"{detail} (state {state!r})".strip(), State.UNKNOWN_CODE
    return Adaptation(str(raw["id"]), str(raw["title"]), State(state), detail, provider)


def _failed(provider: str, err: Exception) -> Adaptation:
    return Adaptation(provider, "in-process adaptations", State.UNKNOWN_CODE, f"cannot be listed: {err!r}", provider)
