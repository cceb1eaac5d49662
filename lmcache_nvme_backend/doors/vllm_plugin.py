"""vLLM's ``general_plugins`` entry point: what must happen before LMCache is imported.

It imports neither torch nor LMCache: importing LMCache this early breaks vLLM's worker. It arms post-import hooks that
do nothing unless LMCache's configuration names this backend, and checks the settings in the front process, where an
error ends the start at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from lmcache_nvme_backend import metrics
from lmcache_nvme_backend.doors import command_line, lmcache_compat, start
from lmcache_nvme_backend.doors.mp import engine_mark
from lmcache_nvme_backend.doors.native import front
from lmcache_nvme_backend.doors.native import settings as native
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.settings import names_this_backend, parse_settings

_registered = False


def registered() -> bool:
    """Whether vLLM ran the entry point in this process (``VLLM_PLUGINS`` can filter it out)."""
    return _registered


def register() -> None:
    """Arm this process. vLLM calls it once in every process, the front one first.

    Raises:
        SystemExit: in the front process, where the settings cannot work.
    """
    global _registered
    _registered = True
    lmcache_compat.arm()
    engine_mark.arm()
    front.arm()
    if multiprocessing.parent_process() is not None:
        return
    _register_native()
    config = None
    try:
        config = configured()
        tiers = command_line.secondary_tiers("NvmeTier")
        if config is None and not tiers:
            return
        metrics.serve_children()
        start.open_report()
        if config is not None:
            check_front(config)
        for tier in tiers:
            check_tier(tier)
    except ConfigError as e:
        if config is not None and start.wants_degrade(config.get("extra_config")):
            return  # the worker finds the same, says it and shows it in a metric
        raise SystemExit(start.describe(e)) from None


def _register_native() -> None:
    """The same for a command line that names vLLM's own offloading through this package.

    Raises:
        SystemExit: the settings cannot work.
    """
    transfer = command_line.transfer_config()
    if not native.names_this_door(transfer):
        return
    metrics.serve_children()
    start.open_report()
    try:
        native.check_front(transfer)
    except ConfigError as e:
        if command_line.connector_extra().get("on_init_error") != "degrade":
            raise SystemExit(start.describe(e)) from None


def configured() -> dict[str, Any] | None:
    """LMCache's configuration as file, variables and vLLM's command line give it, where it names this backend.

    Only the fields that decide about this tier are read; LMCache itself validates the rest.

    Raises:
        ConfigError: the file that LMCACHE_CONFIG_FILE names cannot be read.
    """
    config = _from_file()
    for field in ("extra_config", "storage_plugins", *_CHECKED):
        value = os.environ.get(f"LMCACHE_{field.upper()}")
        if value is not None:
            config[field] = _from_variable(field, value)
    config.update(_from_command_line())
    extra, plugins = config.get("extra_config"), config.get("storage_plugins")
    if isinstance(plugins, str):
        plugins = [p.strip() for p in plugins.split(",")]
    return config if names_this_backend(extra if isinstance(extra, dict) else {}, plugins) else None


_CHECKED = (
    "use_layerwise",
    "enable_pd",
    "enable_blending",
    "enable_scheduler_bypass_lookup",
    "local_cpu",
    "max_local_cpu_size",
    "local_disk",
)


def _from_file() -> dict[str, Any]:
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    if not path:
        return {}
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError("LMCACHE_CONFIG_FILE", repr(path), "a readable YAML file", f"It cannot be read: {e}") from e
    return loaded if isinstance(loaded, dict) else {}


def _from_variable(field: str, value: str) -> Any:
    import yaml

    if field == "storage_plugins":
        return [p.strip() for p in value.strip("[]").replace('"', "").split(",")]
    try:
        return json.loads(value) if field == "extra_config" else yaml.safe_load(value)
    except (json.JSONDecodeError, yaml.YAMLError):
        return None


def _from_command_line() -> dict[str, Any]:
    """``lmcache.*`` fields of ``--kv-transfer-config``'s extra config."""
    extra = command_line.connector_extra()
    return {k.removeprefix("lmcache."): v for k, v in extra.items() if k.startswith("lmcache.")}


def check_front(config: dict[str, Any]) -> None:
    """What can be known without an engine. Called again, on LMCache's own objects, where the plugin is constructed."""
    from lmcache_nvme_backend.doors.refusals import check_lmcache
    from lmcache_nvme_backend.store import StoreSettings
    from lmcache_nvme_backend.store.opening import check_root

    settings = parse_settings(config.get("extra_config"))
    check_lmcache(config.get)
    check_root(Path(settings.path), StoreSettings(settings.quota_bytes))


def check_tier(tier: dict[str, Any]) -> None:
    """The same for an entry of vLLM's `secondary_tiers`. One that may degrade is left to the tier itself."""
    from lmcache_nvme_backend.doors.tier.opening import check_entry

    if tier.get("on_init_error") != "degrade":
        check_entry(tier)
