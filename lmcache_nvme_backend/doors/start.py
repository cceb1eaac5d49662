"""A start that must not go on: how a reason found in a worker ends the engine, as its last lines.

LMCache swallows a plugin's constructor errors and serves without a cache. Under ``on_init_error: fail`` the adaptation
of ``LMCacheManager`` raises what was recorded here, which ends vLLM's start; and because the front process prints its
own traceback then, it repeats the reason at exit, from a small file that its children write.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.run_directory import make_run_directory, run_directory

_REPORT = "start-refused"
logger = logging.getLogger("vllm.lmcache_nvme_backend")

# A refused worker that still lives after this long hangs in somebody's thread, and the engine's start with it.
LAST_RESORT_S = 15.0
TRACKER_WAIT_S = 3.0

_failure: Exception | None = None
_loop: asyncio.AbstractEventLoop | None = None


class StartRefused(RuntimeError):
    """The tier was asked for, cannot work, and ``nvme.on_init_error`` is ``fail``."""


def record_failure(error: Exception, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Keep the reason for whoever is allowed to raise it, and LMCache's event loop, which nobody else may know then."""
    global _failure, _loop
    _failure, _loop = error, loop


def stop_loop() -> None:
    """End LMCache's event loop thread where its StorageManager was never finished: it is no daemon, and would keep the
    worker from exiting, and the engine waiting for the worker."""
    global _loop
    loop, _loop = _loop, None
    if loop is not None and loop.is_running():
        loop.call_soon_threadsafe(loop.stop)


def exit_at_last() -> None:
    """In vLLM's own child processes: be gone within ``LAST_RESORT_S``, whatever threads are left."""
    if not multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker", "Worker")):
        return

    def exit_now() -> None:
        time.sleep(LAST_RESORT_S)
        os._exit(1)

    threading.Thread(target=exit_now, name="kvtier-last-resort", daemon=True).start()


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
    if (directory := run_directory()) is not None:
        with suppress(OSError):  # the traceback says it as well
            (directory / _REPORT).write_text(reason + "\n")
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
    """In the front process: print at the very end what a child will have written by then."""
    # Registered after the directory's own removal, so it runs before that.
    atexit.register(_print_report, make_run_directory() / _REPORT, os.getpid())


def _print_report(path: Path, owner: int) -> None:
    if os.getpid() != owner:
        return
    with suppress(OSError):
        reason = path.read_text()
        _let_the_tracker_finish()
        print(reason, end="", file=sys.stderr, flush=True)


def _let_the_tracker_finish() -> None:
    """multiprocessing's resource tracker warns of what the dead engine left, and would have the last word."""
    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    stop = getattr(tracker, "_stop", None)
    if stop is None:
        return

    def wait() -> None:
        with suppress(Exception):
            stop()

    # It ends when every process that knows it has: a child that hangs must not hang this one.
    waiter = threading.Thread(target=wait, name="kvtier-tracker", daemon=True)
    waiter.start()
    waiter.join(TRACKER_WAIT_S)
