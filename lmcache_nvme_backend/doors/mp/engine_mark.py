"""In vLLM's process: the mark that proves to LMCache's server whose KV a key names.

Asked for by ``"kvtier.identity"`` in ``kv_connector_extra_config``: ``"auto"``, or a text that changes whenever the
weights change. The mark is made once, in the front process, from the configuration as vLLM has resolved it, and goes
to every other process with that configuration: processes see it later in other states, and a scheduler and a worker
that marked differently would never find each other's chunks. There, it is put behind the model's name that LMCache's
connector uses for its keys.

What LMCache's multi-process connector does not put into its keys, a LoRA adapter and the content of an image, is
refused: two requests would be served each other's KV, by LMCache's memory already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import wrapt

from lmcache_nvme_backend.doors import refusals, start
from lmcache_nvme_backend.doors.lmcache_compat import lmcache_version
from lmcache_nvme_backend.doors.mp.identity import digest_of, marked
from lmcache_nvme_backend.doors.vllm_facts import model_identity, vllm_facts
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import NvmeSettings

CONNECTOR = "LMCacheMPConnector"
ASKED = "kvtier.identity"
MARK = "kvtier.mark"
_ARGUMENTS = "vllm.engine.arg_utils"
_ADAPTERS = "lmcache.integration.vllm.vllm_multi_process_adapter"


_armed = False


def arm() -> None:
    """Wrap what has to be wrapped as soon as it is imported, in every process of vLLM. A second call is nothing."""
    global _armed
    if _armed:
        return
    _armed = True
    wrapt.register_post_import_hook(_wrap_arguments, _ARGUMENTS)
    wrapt.register_post_import_hook(_wrap_adapters, _ADAPTERS)


def _wrap_arguments(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "EngineArgs.create_engine_config", _create_engine_config)


def _create_engine_config(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    config = wrapped(*args, **kwargs)
    try:
        mark_engine(config)
    except ConfigError as e:
        raise SystemExit(start.describe(e)) from None
    return config


def mark_engine(vllm_config: Any) -> None:
    """Put the mark into the extra configuration of LMCache's connector, where it is asked for.

    Raises:
        ConfigError: the engine computes KV that LMCache's keys do not tell apart, or its weights cannot be identified.
    """
    transfer: Any = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    asked = extra.get(ASKED)
    if asked is None:
        if MARK in extra:  # of another engine: somebody has copied a configuration
            transfer.kv_connector_extra_config = {name: value for name, value in extra.items() if name != MARK}
        return
    if not isinstance(asked, str) or not asked:
        raise ConfigError(ASKED, repr(asked), '"auto", or a text of your own', 'Set it to "auto".')
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        raise ConfigError(
            ASKED, f"set for the connector {getattr(transfer, 'kv_connector', None)}", CONNECTOR,
            f"Remove it, or set kv_connector to {CONNECTOR}.",
        )  # fmt: skip
    refusals.check_failure_policy(transfer)
    refusals.check_model(vllm_config)
    _check_keys(vllm_config)
    transfer.kv_connector_extra_config = {**extra, MARK: digest_of(facts(asked, vllm_config))}


def facts(asked: str, vllm_config: Any) -> dict[str, Any]:
    """Everything known here that shapes the bytes of KV for given tokens, the same for all ranks of the engine."""
    given = "" if asked == "auto" else asked
    settings = NvmeSettings(path="/", quota_gib=1, model_fingerprint=given)
    with _named(ASKED):
        model = model_identity(settings, "", vllm_config)
    cache, vllm = vllm_config.cache_config, sys.modules.get("vllm")
    return {
        **vllm_facts(vllm_config),
        "model": model,
        # Of rank 0 here; with this partition it stands for all of them.
        "layer_partition": os.environ.get("VLLM_PP_LAYER_PARTITION"),
        "device": str(vllm_config.device_config.device_type),
        "block_tokens": cache.block_size,
        "kv_layout": os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "vllm": str(getattr(vllm, "__version__", None)),
        "lmcache": lmcache_version(),
    }


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors inside come out with the name that the user knows for the fingerprint's setting."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(name, e.found, e.allowed, e.todo) from e.__cause__


def _check_keys(vllm_config: Any) -> None:
    if getattr(vllm_config, "lora_config", None) is not None:
        raise ConfigError(
            "--enable-lora", "true", f"false with {CONNECTOR}",
            "LMCache's multi-process connector leaves the adapter out of its keys, so adapters would be served each "
            "other's KV. Use LMCacheConnectorV1 with this tier's plugin, or start without adapters.",
        )  # fmt: skip
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    if getattr(model, "is_multimodal_model", False) and not getattr(multimodal, "language_model_only", False):
        raise ConfigError(
            "--language-model-only", "false, with a multimodal model", f"true with {CONNECTOR}",
            "LMCache's multi-process connector leaves images out of its keys, so two of them would be taken for one. "
            "Add --language-model-only, or use LMCacheConnectorV1 with this tier's plugin.",
        )  # fmt: skip
    if os.environ.get("LMCACHE_USE_UPSTREAM_MP"):
        raise ConfigError(
            "LMCACHE_USE_UPSTREAM_MP", "set", "unset with lmcache_nvme_backend",
            "vLLM's own copy of the connector does not pass the mark on. Unset it.",
        )  # fmt: skip


def _wrap_adapters(module: Any) -> None:
    for name in ("LMCacheMPSchedulerAdapter", "LMCacheMPWorkerAdapter"):
        wrapt.wrap_function_wrapper(module, f"{name}.__init__", _init_adapter)


def _init_adapter(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``__init__(self, server_url(s), context, model_name, ...)`` of both adapters, in LMCache 0.5.4 to 0.5.6."""
    mark = (kwargs.get("extra_config") or {}).get(MARK)
    if mark is not None:
        if "model_name" in kwargs:
            kwargs = {**kwargs, "model_name": marked(kwargs["model_name"], mark)}
        else:
            args = (*args[:2], marked(args[2], mark), *args[3:])
    return wrapped(*args, **kwargs)
