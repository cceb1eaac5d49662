"""Which vLLM this door can serve, found out by the code that it relies on."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from lmcache_nvme_backend.errors import ConfigError

_ALLOWED = "0.30 to 0.32"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
# Module, class, and the methods of it that are called or overridden here.
_RELIED_ON = (
    (f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler",
     ("on_new_request", "get_num_new_matched_tokens", "update_connector_output")),
    (f"{_OFFLOADING}.worker", "OffloadingConnectorWorker", ("get_finished", "build_connector_worker_meta")),
    (f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", ("aggregate", "mark_completed")),
    ("vllm.v1.kv_offload.base", "OffloadingSpec", ("get_manager", "get_worker")),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", ("submit_store", "submit_load", "get_finished", "wait")),
)  # fmt: skip


def check_release() -> None:
    """Raises `ConfigError` where a failed load cannot be reported, or where the code has another shape."""
    base = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    if not hasattr(base, "KVConnectorTransferResults"):
        raise _refusal(
            "which cannot be told that a load failed: it would end the engine",
            "Upgrade vLLM, or use NvmeTier behind TieringOffloadingSpec, which 0.29 can serve.",
        )
    for module, name, methods in _RELIED_ON:
        try:
            found: Any = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            found = None
        lacking = [method for method in methods if not inspect.isfunction(getattr(found, method, None))]
        if lacking:
            raise _refusal(f"whose {module}.{name} has no {lacking[0]}", "Use a release that this door knows.")


def window_in_chunks() -> Any:
    """vLLM's function of a group's specification and its chunk's tokens: how many chunks a load needs, None for all."""
    name = "get_sliding_window_size_in_chunks"
    for module in ("scheduler", "config"):  # where it is until 0.32, and since
        if (found := getattr(import_module(f"{_OFFLOADING}.{module}"), name, None)) is not None:
            return found
    raise _refusal(f"whose {_OFFLOADING} has no {name}", "Use a release that this door knows.")


def _refusal(why: str, todo: str) -> ConfigError:
    import vllm

    return ConfigError("vllm", f"{vllm.__version__}, {why}", f"{_ALLOWED} with NvmeOffloadingSpec", todo)
