"""In the front process: the digest of the model's configuration, for every process that is started from here.

Some models change their configuration when they are built (MiniMax-M2, Llama 4, LLaVA, Falcon): in a worker's process,
and not in the scheduler's where that is another. Each would come to a namespace of its own, and nothing would be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from lmcache_nvme_backend.doors.native.settings import HF_CONFIG, names_this_door
from lmcache_nvme_backend.doors.vllm_facts import digest_config

_ARGUMENTS = "vllm.engine.arg_utils"
_armed = False


def arm() -> None:
    """Wrap what has to be wrapped as soon as it is imported. A second call is nothing."""
    global _armed
    if not _armed:
        _armed = True
        wrapt.register_post_import_hook(_wrap_arguments, _ARGUMENTS)


def _wrap_arguments(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "EngineArgs.create_engine_config", _create_engine_config)


def _create_engine_config(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    config = wrapped(*args, **kwargs)
    note_configuration(config)
    return config


def note_configuration(vllm_config: Any) -> None:
    """Put the digest into the connector's extra configuration, which goes to every process, if it is this door's."""
    transfer: Any = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    named = {"kv_connector": getattr(transfer, "kv_connector", None), "kv_connector_extra_config": extra}
    if names_this_door(named):
        transfer.kv_connector_extra_config = {**extra, HF_CONFIG: digest_config(vllm_config.model_config.hf_config)}
