"""What the demo has to know of each door: what it adds to vLLM's start, and where its figures are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from kvtier.doors import Door, native_transfer, tier_transfer
from kvtier.engine import Engine
from kvtier.examples import example
from kvtier.geometry.checkpoint import find
from kvtier.geometry.kv import Geometry, read
from kvtier.process import IoCounters
from kvtier.scrape import Metrics
from kvtier.units import GIB
from lmcache_nvme_backend.errors import ConfigError

QUOTA_GIB: Final = 2
# What a whole prompt of the demo needs in the host memory of the doors that pass through it.
HOST_BYTES: Final = GIB


class Side(msgspec.Struct, kw_only=True):
    """One life of the tier: what an engine is started with, and where the tier's own figures and bytes are counted."""

    args: tuple[str, ...] = ()
    lmcache_config: Path | None = None
    tier_metrics: Callable[[Engine], Metrics] = Engine.metrics
    tier_io: Callable[[], IoCounters] = IoCounters
    """Of processes beside the engine, once they have come to rest."""
    host_pool_bytes: Callable[[Metrics], int]
    """Host memory of the cache in front of NVMe, from the tier's metrics where they tell."""


_ONE_SORT: Final[dict[Door, str]] = {
    "plugin": "LMCache's in-process connector cannot run a hybrid model.",
    "mp": "With an engine on a CPU, LMCache's server takes one group of KV layers alone ("
    "engine-driven transfer does not support multiple KV transfer groups).",
}

Lives = Callable[[Path, Path], AbstractContextManager[Side]]
"""Called for each life with the tier's folder and one for logs and configurations."""


def door(name: Door, model: Path) -> Lives:
    """How to start the tier through this door.

    Raises:
        ConfigError: it cannot serve this model.
    """
    geometry = _geometry(model)
    if geometry is not None and (geometry.hybrid if name == "plugin" else geometry.mixed) and name in _ONE_SORT:
        raise ConfigError(
            "--door", f"{name} for {model.name}, whose layers are of several sorts",
            "native or tier for such a model", f"{_ONE_SORT[name]} Use --door native.",
        )  # fmt: skip
    return _LIVES[name](geometry is not None and geometry.mixed)


def _geometry(model: Path) -> Geometry | None:
    """None where the model's configuration does not tell: vLLM says then what is wrong with it."""
    try:
        return read(find(str(model)))
    except ConfigError:
        return None


def lmcache_config(nvme: Path, quota_gib: float) -> dict[str, Any]:
    """The example's LMCache configuration with this folder and this quota in place of its own."""
    config: dict[str, Any] = yaml.safe_load(example("lmcache-nvme.yaml").read_text())
    config["extra_config"] |= {"nvme.path": str(nvme), "nvme.quota_gib": quota_gib}
    return config


def _plugin(_: bool) -> Lives:
    @contextmanager
    def life(nvme: Path, work: Path) -> Iterator[Side]:
        config = work / "lmcache.yaml"
        config.write_text(yaml.safe_dump(lmcache_config(nvme, QUOTA_GIB)))
        yield Side(lmcache_config=config, host_pool_bytes=lambda m: int(m.value("kvtier_lmcache_cpu_pool_bytes")))

    return life


def _native(mixed: bool) -> Lives:
    @contextmanager
    def life(nvme: Path, work: Path) -> Iterator[Side]:
        transfer = native_transfer(str(nvme), QUOTA_GIB, mixed=mixed)
        yield Side(args=_argument(transfer), host_pool_bytes=lambda _: 0)

    return life


def _tier(mixed: bool) -> Lives:
    @contextmanager
    def life(nvme: Path, work: Path) -> Iterator[Side]:
        transfer = tier_transfer(str(nvme), QUOTA_GIB, HOST_BYTES, mixed=mixed, on_cpu=True)
        yield Side(args=_argument(transfer), host_pool_bytes=lambda _: HOST_BYTES)

    return life


def _mp(_: bool) -> Lives:
    from kvtier.lmcache_server import LmcacheServer, LmcacheServerSpec, nvme_adapter

    @contextmanager
    def life(nvme: Path, work: Path) -> Iterator[Side]:
        spec = LmcacheServerSpec(
            log=work / "lmcache-server.log", l2_adapters=(nvme_adapter(nvme, QUOTA_GIB),), l1_gb=HOST_BYTES / GIB
        )
        with LmcacheServer(spec) as server:
            yield Side(
                args=_argument(server.kv_transfer),
                tier_metrics=lambda _: server.metrics(),
                tier_io=server.process.settled_io,
                host_pool_bytes=lambda _: HOST_BYTES,
            )

    return life


def _argument(transfer: dict[str, Any]) -> tuple[str, ...]:
    return ("--kv-transfer-config", json.dumps(transfer))


_LIVES: Final[dict[Door, Callable[[bool], Lives]]] = {"plugin": _plugin, "native": _native, "tier": _tier, "mp": _mp}
