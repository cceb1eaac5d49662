"""What vLLM's connector knows of the engine and does not hand on to an offloading spec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

from lmcache_nvme_backend.doors.native.settings import check_connector


class EngineView(msgspec.Struct):
    """vLLM's configurations of this process, whether it is the scheduler's side, and the spec made within."""

    vllm_config: Any
    kv_cache_config: Any
    schedules: bool
    spec: Any = None


_current: ContextVar[EngineView | None] = ContextVar("kvtier-native-engine", default=None)


@contextmanager
def entered(vllm_config: Any, role: Any, kv_cache_config: Any) -> Iterator[EngineView]:
    """While this door's connector makes its spec."""
    view = EngineView(vllm_config, kv_cache_config, getattr(role, "name", str(role)) == "SCHEDULER")
    token = _current.set(view)
    try:
        yield view
    finally:
        _current.reset(token)


def current_engine() -> EngineView:
    """Raises `ConfigError` where another connector makes the spec."""
    view = _current.get()
    if view is None:
        check_connector(None)
    assert view is not None
    return view
