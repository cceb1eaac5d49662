"""A start that must not go on: how a reason found in a worker ends the engine, as its last lines.

LMCache swallows a plugin's constructor errors and serves without a cache. Under ``on_init_error: fail`` the adaptation
of ``LMCacheManager`` raises what was recorded here, which ends vLLM's start; and because the front process prints its
own traceback then, it repeats the reason at exit, from a small file that its children write.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lmcache_nvme_backend.errors import ConfigError

REPORT_VARIABLE = "KVTIER_START_REPORT"
logger = logging.getLogger("vllm.lmcache_nvme_backend")

_failure: Exception | None = None


class StartRefused(RuntimeError):
    """The tier was asked for, cannot work, and ``nvme.on_init_error`` is ``fail``."""


def record_failure(error: Exception) -> None:
    """Keep the reason for whoever is allowed to raise it."""
    global _failure
    _failure = error


def take_failure() -> Exception | None:
    global _failure
    failure, _failure = _failure, None
    return failure


def wants_degrade(extra_config: Any) -> bool:
    return (extra_config or {}).get("nvme.on_init_error") == "degrade"


def describe(error: BaseException | str) -> str:
    text = str(error) if isinstance(error, ConfigError | str) else f"{type(error).__name__}: {error}"
    return f"lmcache_nvme_backend: the start was refused: {text}"


def refuse(error: BaseException | str) -> StartRefused:
    """The exception to raise; its reason also goes to the front process."""
    reason = describe(error)
    if report := os.environ.get(REPORT_VARIABLE):
        try:
            Path(report).write_text(reason + "\n")
        except OSError:
            pass  # the traceback says it as well
    return StartRefused(reason)


def announce_degraded(error: BaseException | str) -> None:
    text = str(error) if not isinstance(error, BaseException) else describe(error).split("refused: ", 1)[1]
    logger.error(
        "lmcache_nvme_backend: DEGRADED: the NVMe tier is off and every prompt is prefilled again "
        "(nvme.on_init_error: degrade). Reason: %s",
        text,
    )


def show_degraded(metadata: Any | None) -> None:
    """Export ``kvtier_degraded 1`` for this rank, for as long as the process lives."""
    rank = getattr(metadata, "worker_id", 0)
    if getattr(metadata, "role", None) == "scheduler" or rank in _degraded:
        return
    from lmcache_nvme_backend.metrics import MetricsExporter

    _degraded[rank] = MetricsExporter(lambda: {"kvtier_degraded": 1}, rank)


_degraded: dict[int, Any] = {}


def open_report() -> None:
    """In the front process: make the file that children write, and print it at the very end."""
    if multiprocessing.parent_process() is not None or REPORT_VARIABLE in os.environ:
        return
    fd, path = tempfile.mkstemp(prefix="kvtier-start-")
    os.close(fd)
    os.environ[REPORT_VARIABLE] = path
    atexit.register(_print_report, Path(path), os.getpid())


def _print_report(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return
    try:
        reason = path.read_text()
        path.unlink()
    except OSError:
        return
    if reason:
        print(reason, end="", file=sys.stderr, flush=True)
