"""The few places where LMCache has to be told of this backend: in the process, no file is changed.

Each adaptation wraps one function and does nothing unless LMCache's configuration names this backend. It is armed by a
post-import hook (vLLM's entry point) or, at the latest, when the plugin is constructed, which is before LMCache picks
its allocator. Each checks the function it wraps; one that it does not know is refused with LMCache's version.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import wrapt

from lmcache_nvme_backend.doors import requests, scope, start, steps
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import names_this_backend

SUPPORTED = "0.5.4 to 0.5.6"
Function = Callable[..., Any]


def _ours(config: Any) -> bool:
    return names_this_backend(getattr(config, "extra_config", None), getattr(config, "storage_plugins", None))


def find_backend(storage_manager: Any) -> Any | None:
    """Our backend among a ``StorageManager``'s, also behind LMCache's audit wrapper."""
    door = sys.modules.get("lmcache_nvme_backend.doors.lmcache_backend")
    if door is None or storage_manager is None:
        return None
    for backend in storage_manager.storage_backends.values():
        backend = getattr(backend, "real_backend", backend)
        if isinstance(backend, door.NvmeBackend):
            return backend
    return None


def _own_allocator(original: Function) -> Function:
    @functools.wraps(original)
    def _get_allocator_backend(self: Any, config: Any) -> Any:
        if "LocalCPUBackend" not in self.storage_backends and (backend := find_backend(self)) is not None:
            return backend
        return original(self, config)

    return _get_allocator_backend


def _announced_store(original: Function) -> Function:
    @functools.wraps(original)
    def store(
        self: Any, tokens: Any = None, hashes: Any = None, offsets: Any = None, mask: Any = None, **kw: Any
    ) -> Any:
        backend = find_backend(self.storage_manager)
        if backend is None or tokens is None:
            return original(self, tokens, hashes, offsets, mask, **kw)
        skipped = int(mask.numel() - mask.sum()) if mask is not None else 0
        with backend.storing(kw.get("req_id"), skipped, len(tokens)) as admitted:
            return original(self, tokens, hashes, offsets, mask, **kw) if admitted else None

    return store


def _noted_keys(original: Function) -> Function:
    @functools.wraps(original)
    def process_tokens(self: Any, *args: Any, **kw: Any) -> Any:
        for item in original(self, *args, **kw):
            call = requests.current_call()
            if call is not None:
                call.key = item[2]
            yield item

    return process_tokens


def _cut_retrieve(original: Function) -> Function:
    @functools.wraps(original)
    def retrieve(self: Any, tokens: Any, mask: Any = None, **kw: Any) -> Any:
        backend = find_backend(self.storage_manager)
        if backend is None:
            return original(self, tokens, mask, **kw)
        import torch

        skipped = int(mask.numel() - mask.sum()) if mask is not None else 0
        with backend.retrieving(skipped) as call, torch.inference_mode():
            retrieved = original(self, tokens, mask, **kw)
            failed = call.failed_from()
            if failed is not None:
                # Loading had begun when the chunk turned out bad: vLLM computes from there on.
                retrieved[failed * self.metadata.chunk_size :] = False
            wanted = int(mask.sum()) if mask is not None else len(tokens)
            if int(retrieved.sum()) < wanted:
                backend.load_failed(kw.get("req_id"), len(tokens))
        return retrieved

    return retrieve


def _attached(original: Function) -> Function:
    @functools.wraps(original)
    def post_init(self: Any, **kw: Any) -> None:
        original(self, **kw)
        if (backend := find_backend(self.storage_manager)) is not None:
            backend.attach(self)

    return post_init


def _marked_request(original: Function) -> Function:
    @functools.wraps(original)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        if _ours(self.config):
            scope.mark_request(request)
        return original(self, request, num_computed_tokens)

    return get_num_new_matched_tokens


def _stepped_save(original: Function) -> Function:
    @functools.wraps(original)
    def wait_for_save(self: Any) -> Any:
        if not _ours(self.config):
            return original(self)
        engine = self.lmcache_engine
        backend = find_backend(engine.storage_manager) if engine is not None else None
        loading = steps.loading_requests(self._parent._get_connector_metadata())
        # Every rank takes part, also one that has no tier: it computes with what it could not load.
        failed = bool(loading) and steps.failed_on_any_rank(
            backend is None or backend.load_has_failed, self._vllm_config
        )
        if backend is None:
            return original(self)
        with backend.saving_step([(r.req_id, r.load_spec.lmcache_cached_tokens) for r in loading] if failed else []):
            return original(self)

    return wait_for_save


def _self_tested(original: Function) -> Function:
    @functools.wraps(original)
    def register_kv_caches(self: Any, kv_caches: Any) -> None:
        original(self, kv_caches)
        engine = self.lmcache_engine
        backend = find_backend(engine.storage_manager) if engine is not None and _ours(self.config) else None
        if backend is None or not kv_caches:
            return
        reason = backend.self_test(engine.gpu_connector, list(kv_caches.values()), self._vllm_config.cache_config)
        if reason is not None:
            _fail_or_degrade(self._manager, self.config, reason, backend)

    return register_kv_caches


def _cpu_connector(original: Function) -> Function:
    @functools.wraps(original)
    def CreateGPUConnector(config: Any, metadata: Any, engine: Any, *args: Any, **kw: Any) -> Any:
        from lmcache import torch_device_type

        if torch_device_type == "cpu" and getattr(engine, "name", "") == "VLLM" and _ours(config):
            from lmcache_nvme_backend.doors.cpu_connector import CpuBlockConnector

            return CpuBlockConnector(metadata)
        return original(config, metadata, engine, *args, **kw)

    return CreateGPUConnector


def _loud_init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kw: Any) -> None:
        original(self, config, *args, **kw)
        if self._init_failed and _ours(config):
            _fail_or_degrade(self, config, self._init_failed_reason.strip().splitlines()[-1])

    return __init__


def _loud_post_init(original: Function) -> Function:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        degraded_before = self._init_failed
        original(self)
        engine = self.lmcache_engine
        if engine is None or degraded_before or not _ours(self.config):
            return
        failure = start.take_failure()
        passive = engine.storage_manager is None and not self._init_failed
        if failure is None and (passive or find_backend(engine.storage_manager) is not None):
            return
        reason = failure or (self._init_failed_reason.strip().splitlines() or ["the plugin was not constructed"])[-1]
        _fail_or_degrade(self, self.config, reason)

    return post_init


def _fail_or_degrade(manager: Any, config: Any, reason: BaseException | str, backend: Any = None) -> None:
    engine = manager.lmcache_engine
    if engine is None or engine.storage_manager is None:
        start.stop_loop()
    if start.wants_degrade(config.extra_config):
        start.announce_degraded(reason)
        if backend is not None:
            backend.withdraw()
        else:
            start.show_degraded(manager.lmcache_engine_metadata)
        return
    refused = start.refuse(reason)
    start.exit_at_last()
    manager.stop_services()
    raise refused


class Adaptation(msgspec.Struct, frozen=True):
    """One wrapped function: where it is, which leading parameters it must have, and what it becomes."""

    id: str
    title: str
    module: str
    attribute: str
    parameters: tuple[str, ...]
    wrap: Callable[[Function], Function]

    def locate(self) -> tuple[Any, str, Function]:
        """The owner, the name and the function as it stands. AttributeError where LMCache has no such function."""
        owner: Any = importlib.import_module(self.module)
        *path, name = self.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, name, getattr(owner, name)

    def state(self) -> str:
        """``applied``, ``needed``, ``unknown-code`` or ``not-installed``."""
        try:
            _, _, function = self.locate()
        except ModuleNotFoundError as e:
            return "not-installed" if e.name in ("lmcache", "vllm") else "unknown-code"
        except (ImportError, AttributeError):
            return "unknown-code"
        if getattr(function, "_kvtier", None) == self.id:
            return "applied"
        found = tuple(inspect.signature(function).parameters)
        return "needed" if found[: len(self.parameters)] == self.parameters else "unknown-code"

    def apply(self) -> None:
        """Wrap the function; nothing where it is wrapped already.

        Raises:
            ConfigError: LMCache's function is not the one this adaptation was written for.
        """
        state = self.state()
        if state not in ("applied", "needed"):
            raise ConfigError(
                "lmcache", f"version {lmcache_version()}, whose {self.module}.{self.attribute} is not known here",
                f"versions {SUPPORTED}", f"Install one of them (adaptation {self.id}: {self.title}).",
            )  # fmt: skip
        if state == "needed":
            owner, name, function = self.locate()
            wrapped = self.wrap(function)
            wrapped._kvtier = self.id  # type: ignore[attr-defined]
            setattr(owner, name, wrapped)


_V1 = "lmcache.v1"
_ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"
ADAPTATIONS = (
    Adaptation(
        "lmcache-allocator", "this backend is the allocator where LMCache has no CPU pool",
        f"{_V1}.storage_backend.storage_manager", "StorageManager._get_allocator_backend", ("self", "config"),
        _own_allocator,
    ),
    Adaptation(
        "lmcache-store", "a store says which request and which part of its prefix it is",
        f"{_V1}.cache_engine", "LMCacheEngine.store", ("self", "tokens", "hashes", "offsets", "mask"), _announced_store,
    ),
    Adaptation(
        "lmcache-keys", "a store's keys are known before its bytes move",
        f"{_V1}.token_database", "ChunkedTokenDatabase.process_tokens", ("self", "tokens", "hashes", "offsets", "mask"),
        _noted_keys,
    ),
    Adaptation(
        "lmcache-retrieve", "a chunk that turns out bad while it is loaded ends the answer there",
        f"{_V1}.cache_engine", "LMCacheEngine.retrieve", ("self", "tokens", "mask"), _cut_retrieve,
    ),
    Adaptation(
        "lmcache-attach", "the backend learns which connector will walk its objects",
        f"{_V1}.cache_engine", "LMCacheEngine.post_init", ("self",), _attached,
    ),
    Adaptation(
        "lmcache-init", "a failed start ends the engine instead of serving without a cache",
        f"{_V1}.manager", "LMCacheManager.__init__", ("self", "config", "service_factory"), _loud_init,
    ),
    Adaptation(
        "lmcache-post-init", "a failed plugin ends the engine instead of serving without a cache",
        f"{_V1}.manager", "LMCacheManager.post_init", ("self",), _loud_post_init,
    ),
    Adaptation(
        "lmcache-cpu-connector", "LMCache has no connector for in-process vLLM on a CPU",
        f"{_V1}.gpu_connector", "CreateGPUConnector", ("config", "metadata", "engine"), _cpu_connector,
    ),
    Adaptation(
        "lmcache-scope", "LoRA adapter and cache_salt become part of the key",
        _ADAPTER, "LMCacheConnectorV1Impl.get_num_new_matched_tokens", ("self", "request", "num_computed_tokens"),
        _marked_request,
    ),
    Adaptation(
        "lmcache-self-test", "a chunk that does not come back as it went in ends the start",
        _ADAPTER, "LMCacheConnectorV1Impl.register_kv_caches", ("self", "kv_caches"), _self_tested,
    ),
    Adaptation(
        "lmcache-step", "a step in which a load failed is not stored; the bound on store waits is a step's",
        _ADAPTER, "LMCacheConnectorV1Impl.wait_for_save", ("self",), _stepped_save,
    ),
)  # fmt: skip


def arm() -> None:
    """Apply each adaptation as soon as its module is imported. Errors come up where the plugin is built."""

    def hook(adaptation: Adaptation) -> Callable[[Any], None]:
        def apply(module: Any) -> None:
            try:
                adaptation.apply()
            except ConfigError as e:
                start.record_failure(e)

        return apply

    for adaptation in ADAPTATIONS:
        wrapt.register_post_import_hook(hook(adaptation), adaptation.module)


def apply_all(with_vllm: bool) -> None:
    """Apply every adaptation now, those of the vLLM adapter only where vLLM is the engine.

    Raises:
        ConfigError: one of them does not know the installed LMCache.
    """
    for adaptation in ADAPTATIONS:
        if with_vllm or adaptation.module != _ADAPTER:
            adaptation.apply()


def lmcache_version() -> str:
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def adaptations() -> list[dict[str, str]]:
    """What this stack carries for LMCache, for ``kvtier patch status``: id, title, state, detail.

    ``needed`` is right for an installed LMCache: each engine applies them to itself when it starts.
    """
    if "lmcache" not in sys.modules:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # importing it would print some twenty lines
    detail = f"LMCache {lmcache_version()}; applied in the engine's process when it starts, no file is changed"
    return [{"id": a.id, "title": a.title, "state": a.state(), "detail": detail} for a in ADAPTATIONS]
