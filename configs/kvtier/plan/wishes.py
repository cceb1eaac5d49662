"""What the user asked for, checked once at the edge."""

from __future__ import annotations

import math
import re

import msgspec

from kvtier.facts import Node
from kvtier.plan.advice import EngineFigures
from kvtier.plan.engine_rates import EngineRates
from lmcache_nvme_backend.errors import ConfigError

# Methods that vLLM takes in --speculative-config and that draft with layers of their own.
SPECULATIVE = ("mtp", "eagle", "eagle3", "ngram", "draft_model")
ENGINES = ("vllm", "sglang")
_VERSION = re.compile(r"\d+(\.\d+){1,3}([.-]?(a|b|rc|post|dev)\d*)*(\+[\w.-]+)?", re.IGNORECASE)
DEFAULT_TARGET = "0.32.0"
"""The release assumed where none is installed and none is named: the newest one that these rules were run against."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``kvtier plan``. None and 0-width defaults mean "not said"."""

    ram_gib: int | None = None
    nvme: str | None = None
    nvme_gib: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    tp: int | None = None
    pp: int = 1
    nodes: tuple[Node, ...] = ()
    spec: str | None = None
    spec_tokens: int = 1
    lora: bool = False
    target_vllm: str | None = None
    engine: str = "vllm"
    typical_tokens: int | None = None
    """Length of a usual request, for the advice on seats."""
    prefill_tokens_per_s: float | None = None
    link_gbps: float | None = None
    nvme_gbps: float | None = None
    """Rates given by the user, in GB/s; they go before measured ones."""
    engine_rates: EngineRates | None = None
    """What an engine with this tier measured of prefill and loads."""
    figures: EngineFigures | None = None
    """What an engine on this box said of its pool."""
    lmcache_file: str = "/etc/kvtier/lmcache.yaml"
    """Where the LMCache configuration will lie on the host that serves."""


def size(setting: str, text: str | None) -> int | None:
    """A size in whole GiB from the command line.

    Raises:
        ConfigError: not a whole number, or not above 0. (vLLM itself takes 0, -1 and 1.5 and dies later.)
    """
    return _whole(setting, text, "a whole number of GiB above 0", "such as 16")


def number(setting: str, text: str | None) -> int | None:
    """A count from the command line; errors as for `size`."""
    return _whole(setting, text, "a whole number above 0", "such as 2")


def number_or_none(setting: str, text: str) -> int:
    """A count of which 0 means none; errors as for `size`."""
    return _whole(setting, text, "a whole number, 0 or more", "such as 3", least=0) or 0


def rate(setting: str, text: str | None, unit: str) -> float | None:
    """A finite number above 0, in `unit`, from the command line.

    Raises:
        ConfigError: not a number, not finite, or not above 0.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(setting, repr(text), f"a number of {unit} above 0", f"Give one, or leave {setting} out.")
    return value


def version(text: str | None) -> str | None:
    """A release of vLLM, such as ``0.32.0``; a tag's ``v`` is left out.

    Raises:
        ConfigError: not a version.
    """
    if text is None:
        return None
    plain = text.strip().removeprefix("v").removeprefix("V")
    if not _VERSION.fullmatch(plain):
        raise ConfigError("--target-vllm", repr(text), "a release of vLLM", "Such as 0.32.0.")
    return plain


def _whole(setting: str, text: str | None, allowed: str, example: str, least: int = 1) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(setting, repr(text), allowed, f"Give one {example}.") from None
    if value < least:
        raise ConfigError(setting, repr(text), allowed, f"Give one {example}, or leave {setting} out.")
    return value


def speculation(text: str | None) -> tuple[str | None, int]:
    """``mtp`` or ``mtp:4`` (method, draft tokens)."""
    if text is None:
        return None, 1
    method, _, tokens = text.partition(":")
    if method not in SPECULATIVE:
        raise ConfigError(
            "--spec", repr(text), ", ".join(SPECULATIVE) + ", each with :TOKENS if wanted", "Such as --spec mtp:4."
        )
    return method, number("--spec", tokens or "1") or 1


def nodes(text: str | None) -> tuple[Node, ...]:
    """``spark-0=192.168.100.1@enp1s0,spark-1=…``: name, address and the interface the ranks talk over."""
    if text is None:
        return ()
    found = []
    for index, part in enumerate(text.split(",")):
        name, equals, rest = part.strip().rpartition("=")
        address, _, interface = rest.partition("@")
        if not address or address.isdigit():
            raise ConfigError(
                "--nodes",
                repr(text),
                "a list such as spark-0=192.168.100.1@eth1,spark-1=192.168.100.2",
                "Name each host's address; the first is rank 0.",
            )
        found.append(Node(name=name if equals else f"node-{index}", address=address, interface=interface or None))
    for kind in ("name", "address"):
        seen = [getattr(node, kind) for node in found]
        twice = next((value for value in seen if seen.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(
                "--nodes", f"{twice} twice", "each host once", "One host's devices are ranks by --tp, not by --nodes."
            )
    return tuple(found)
