"""What an engine on this box measured: from which prefix on loading beats computing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lmcache_nvme_backend.errors import ConfigError


class EngineRates(msgspec.Struct, frozen=True):
    """`break_even` of what `benchmarks/engine_ttft.py --json FILE` wrote.

    `tokens`: the shortest prefix that came sooner from the tier, a whole number of chunks; None where none did, up to
    the longest one measured.
    """

    tokens: int | None
    prefill_tokens_per_s: float
    load_tokens_per_s: float
    load_fixed_s: float
    source: str = ""


class _File(msgspec.Struct):
    break_even: EngineRates | None = None
    model: str = ""


def read(path: Path) -> EngineRates:
    """The rates in a benchmark's JSON file.

    Raises:
        ConfigError: the file is missing, is something else, or holds no break-even.
    """
    allowed = "what `benchmarks/engine_ttft.py --json FILE` wrote"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError("--engine-rates", f"{path} ({error.strerror})", allowed, "Run that benchmark.") from error
    except msgspec.MsgspecError as error:
        raise ConfigError("--engine-rates", f"{path}: {error}", allowed, "Run that benchmark again.") from error
    rates = found.break_even
    if rates is None or (rates.tokens is not None and rates.tokens <= 0):
        raise ConfigError("--engine-rates", f"{path} without a break-even", allowed, "Run it with both subjects.")
    return msgspec.structs.replace(rates, source=f"{found.model or 'the model'} in {path.name}")
