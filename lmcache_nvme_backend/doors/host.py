"""What the process around the door has: a device with streams, and vLLM's configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def stream_fence(device: str) -> Callable[[], Any]:
    """An event on the consumer's current stream, where the device has streams; a CPU is done when it returns."""
    if device == "cpu":
        return lambda: None
    from lmcache import torch_dev

    def record() -> Any:
        event = torch_dev.Event()
        event.record()
        return event

    return record


def current_vllm_config() -> Any | None:
    """vLLM's configuration of this process, or ``None`` outside vLLM."""
    if "vllm.config" not in sys.modules:
        return None
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()
