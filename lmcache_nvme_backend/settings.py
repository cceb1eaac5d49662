"""The tier's settings: one struct, parsed once from LMCache's ``extra_config``.

Every setting is a key ``nvme.<name>`` there, and ``<name>`` in the dictionaries of the other doors.
``configs/examples/lmcache-nvme.yaml`` is the reference entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lmcache_nvme_backend.errors import ConfigError

PREFIX = "nvme."
ROOT_DIR = "root_dir"  # what tiers' dictionaries call the path
GIB = 1 << 30
MIB = 1 << 20

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]


class NvmeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user can set, with units in the names.

    The defaults of bounds, and why:

    - ``staging_mib`` 256: holds a 45-chunk prefix of a small model and two chunks of the largest dense ones (a 70B
      model's 256-token chunk is 80 MiB), and is still under 1 % of the smallest unified-memory box.
    - ``io_threads`` 4: one thread reaches the line of most drives with 6 MiB chunks, four also hide checksums.
    - ``admission`` auto: chosen by benchmarks/eviction.py; it writes less where that loses no hits.
    - ``store_wait_ms`` 250: a step that fills the ring waits for the drive rather than dropping what it just computed;
      a quarter second is what one step of a long prefill takes anyway.
    - ``lock_wait_s`` 10: a killed engine is gone, and its locks with it, well within that.
    """

    path: str
    quota_gib: PositiveFloat
    staging_mib: PositiveInt = 256
    io_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    direct_io: Literal["auto", "on", "off"] = "auto"
    fsync: Literal["none", "data"] = "none"
    codec: Literal["none", "zstd"] = "none"
    admission: Literal["all", "second-sight", "auto"] = "auto"
    write_budget_gib_per_day: NonNegativeFloat = 0.0
    store_wait_ms: NonNegativeFloat = 250.0
    lock_wait_s: NonNegativeFloat = 10.0
    model_fingerprint: str = ""
    on_init_error: Literal["fail", "degrade"] = "fail"
    self_test: Literal["on", "off"] = "on"

    @property
    def quota_bytes(self) -> int:
        return int(self.quota_gib * GIB)

    @property
    def write_budget_bytes_per_day(self) -> int:
        """0 for none."""
        return int(self.write_budget_gib_per_day * GIB)

    @property
    def staging_bytes(self) -> int:
        return self.staging_mib * MIB


_REQUIRED = ("path", "quota_gib")


def parse_settings(extra_config: Mapping[str, Any] | None) -> NvmeSettings:
    """Turn LMCache's ``extra_config`` into settings.

    Raises:
        ConfigError: an unknown ``nvme.*`` key (with the nearest known one), a missing or malformed value.
    """
    given = {k[len(PREFIX) :]: v for k, v in (extra_config or {}).items() if str(k).startswith(PREFIX)}
    return _settings(given, "extra_config in the LMCache configuration")


def parse_tier_settings(
    config: Mapping[str, Any], others: Collection[str] = (), *, where: str, **defaults: Any
) -> NvmeSettings:
    """Settings from a dictionary of one tier, as vLLM's and LMCache's server's configurations have it: the same names
    without the prefix, and ``root_dir`` for the path.

    Args:
        others: keys of the dictionary that are not this tier's.
        where: the dictionary's name, for messages.
        defaults: of this door, where they are not those of `NvmeSettings`.

    Raises:
        ConfigError: an unknown key, a missing or malformed value; names are those of the dictionary.
    """
    given = {("path" if k == ROOT_DIR else k): v for k, v in config.items() if k not in others}
    with tier_names():
        if "path" in config:
            raise ConfigError(PREFIX + "path", "under the name 'path'", ROOT_DIR, f"Rename it to {ROOT_DIR}.")
        return _settings({**defaults, **given}, where)


@contextmanager
def tier_names() -> Iterator[None]:
    """Inside, a `ConfigError` comes out with the names that a tier's dictionary has for the settings."""
    try:
        yield
    except ConfigError as e:
        texts = (e.setting, e.found, e.allowed, e.todo)
        raise ConfigError(*(t.replace(PREFIX + "path", ROOT_DIR).replace(PREFIX, "") for t in texts)) from e.__cause__


def _settings(given: dict[str, Any], where: str) -> NvmeSettings:
    # YAML and environment variables write on and off as booleans.
    for name in ("direct_io", "self_test"):
        if isinstance(given.get(name), bool):
            given[name] = "on" if given[name] else "off"
    known = [f.name for f in msgspec.structs.fields(NvmeSettings)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {PREFIX}{near[0]}?" if near else "Remove it."
            raise ConfigError(f"{PREFIX}{name}", "an unknown setting", ", ".join(PREFIX + k for k in known), hint)
    for name in _REQUIRED:
        if given.get(name) in (None, ""):
            raise ConfigError(
                PREFIX + name,
                "nothing",
                "an absolute directory" if name == "path" else "a size in GiB above 0",
                f"Set {PREFIX}{name} under {where}.",
            )
    for name, value in given.items():
        try:
            msgspec.convert({**{k: _PROBE[k] for k in _REQUIRED}, name: value}, NvmeSettings, strict=False)
        except msgspec.ValidationError as e:
            raise ConfigError(PREFIX + name, repr(value), _allowed(name), str(e).split(" - at")[0] + ".") from e
    settings = msgspec.convert(given, NvmeSettings, strict=False)
    _check(settings)
    return settings


_PROBE = {"path": "/", "quota_gib": 1}


def _allowed(name: str) -> str:
    return {
        "direct_io": "auto, on, off", "fsync": "none, data", "codec": "none, zstd",
        "admission": "all, second-sight, auto", "write_budget_gib_per_day": "a number of GiB above 0, or 0 for none",
        "on_init_error": "fail, degrade", "self_test": "on, off",
        "path": "an absolute directory", "model_fingerprint": "a text", "io_threads": "a whole number, 1 to 64",
        "staging_mib": "a whole number of MiB above 0", "quota_gib": "a number of GiB above 0",
    }.get(name, "a number, 0 or more")  # fmt: skip


def _check(settings: NvmeSettings) -> None:
    if not Path(settings.path).is_absolute():
        raise ConfigError("nvme.path", repr(settings.path), "an absolute directory", "Write the path from the root.")
    if settings.quota_gib == float("inf") or settings.quota_gib != settings.quota_gib:
        raise ConfigError("nvme.quota_gib", str(settings.quota_gib), "a finite number of GiB", "Set a size.")
    budget = settings.write_budget_gib_per_day
    if budget == float("inf") or budget != budget:
        raise ConfigError(
            "nvme.write_budget_gib_per_day", str(budget), "a finite number of GiB", "Set it to 0 for no budget."
        )
    if settings.quota_bytes < settings.staging_bytes:
        raise ConfigError(
            "nvme.quota_gib",
            f"{settings.quota_gib:g} GiB",
            f"at least one staging ring ({settings.staging_mib} MiB)",
            "Raise nvme.quota_gib or lower nvme.staging_mib.",
        )


def names_this_backend(extra_config: Mapping[str, Any] | None, plugins: list[str] | None) -> bool:
    """Whether an LMCache configuration names this package as one of its active storage plugins."""
    return any(
        (extra_config or {}).get(f"storage_plugin.{plugin}.module_path") == "lmcache_nvme_backend"
        for plugin in plugins or ()
    )
