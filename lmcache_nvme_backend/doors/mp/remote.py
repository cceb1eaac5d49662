"""One of LMCache's own L2 adapters, asked from here: futures for its tasks, and whether it works at all.

Most adapters answer a lookup in a store that is gone as one of a store that is empty. So every now and then a small
object is stored and looked up, and only where it is found is the store behind asked for anything else.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any, Final, Literal

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.platform import consume_fd, create_event_notifier

from lmcache_nvme_backend.doors.mp.buffers import Buffer
from lmcache_nvme_backend.errors import ConfigError

logger = init_logger("lmcache_nvme_backend")

Kind = Literal["store", "lookup", "load"]

# The probe: rarely while all is well, since a request may cost money, and often while it is not.
PROBE_UP_S: Final = 30.0
PROBE_DOWN_S: Final = 2.0
PROBE_WAIT_S: Final = 5.0
# A client that has failed so many probes is made anew: some never connect again by themselves.
PROBES_A_CLIENT: Final = 2
_PROBE_BYTES: Final = 64
# A close that hangs must not hang the server's end.
_CLOSE_WAIT_S: Final = 10.0
_TICK_MS: Final = 200
# What adapters take that no log should show.
_SECRET: Final = re.compile(r"password|secret|token$|_key$", re.IGNORECASE)


def parse_remote(spec: dict[str, Any]) -> Any:
    """LMCache's configuration object for an adapter's JSON. Raises `ConfigError`."""
    try:
        (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)])).adapters
    except Exception as e:  # whatever the adapter's own parser raises
        raise ConfigError(
            "behind", json.dumps({name: value for name, value in spec.items() if not _SECRET.search(name)}),
            "what --l2-adapter of the installed LMCache takes", str(e).replace("--l2-adapter #1", "behind"),
        ) from e  # fmt: skip
    return config


class Remote:
    """Thread-safe. One thread of its own makes the adapter, probes it and takes its results; nothing raises."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self.name = config, name
        self._lock = threading.Lock()
        self._adapter: Any = None
        # With the number of its keys, and the object whose memory the adapter has.
        self._pending: dict[tuple[Kind, int], tuple[Future[Any], int, Any]] = {}
        self._abandoned: dict[int, Any] = {}  # objects whose memory must never go: some adapter may still use it
        self._wake: Any = create_event_notifier()
        self._up = threading.Event()
        self._suspect = False
        self._stop = threading.Event()
        self._waking = threading.Lock()  # its own: `_lock` may be held while a client hangs
        self._closed = False
        self._closing: threading.Thread | None = None
        self._why = ""
        self._thread = threading.Thread(target=self._run, name="kvtier-behind", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether the last probe was answered, and nothing has failed since."""
        return self._up.is_set() and not self._suspect

    def wait_up(self, timeout_s: float) -> bool:
        return self._up.wait(timeout_s)

    def store(self, key: Any, obj: Any) -> Future[bool] | None:
        """The future's result: whether it is there now. None where the store behind is not asked."""
        if not self.up:
            return None
        return self._submit("store", lambda adapter: adapter.submit_store_task([key], [obj]), obj=obj)

    def lookup(self, keys: Sequence[Any]) -> Future[list[bool]] | None:
        """The future's result: which of the keys are there. Nothing is left locked."""
        what = list(keys)
        return (
            self._submit("lookup", lambda adapter: adapter.submit_lookup_and_lock_task(what, {}), what)
            if self.up
            else None
        )

    def load(self, key: Any, obj: Any) -> Future[bool] | None:
        """The future's result: whether `obj` has been filled. Until then its memory belongs to the adapter."""
        if not self.up:
            return None
        return self._submit("load", lambda adapter: adapter.submit_load_task([key], [obj]), obj=obj)

    def suspect(self, why: str) -> None:
        """Something did not come in time or failed: ask nothing more before the next probe is answered."""
        if not self._suspect:
            self._suspect, self._why = True, why
            self._notify()

    def _submit(
        self, kind: Kind, submit: Callable[[Any], int], keys: list[Any] | None = None, obj: Any = None
    ) -> Future[Any] | None:
        future: Future[Any] = Future()
        with self._lock:  # so that a result is not looked for before its task is known
            if self._adapter is None:
                return None
            try:
                task = submit(self._adapter)
            except Exception as e:
                self._why = f"{type(e).__name__}: {e}"
                self._suspect = True
                return None
            self._pending[kind, task] = future, len(keys or (0,)), obj
        if keys is not None:
            adapter = self._adapter
            future.add_done_callback(lambda done: _unlock(adapter, keys, done.result()))
        return future

    # -- the thread

    def _run(self) -> None:
        probe = _Probe(self)
        while not self._stop.is_set():
            try:
                if self._adapter is None:
                    self._make()
                if self._adapter is not None:
                    self._collect()
                    probe.step()
                else:
                    self._stop.wait(PROBE_DOWN_S)
            except Exception:
                logger.exception("lmcache_nvme_backend: the store behind (%s)", self.name)
                self._stop.wait(PROBE_DOWN_S)
        self._drop_adapter()

    def _make(self) -> None:
        try:
            adapter = create_l2_adapter(self._config)
        except Exception as e:
            self.say_down(f"{type(e).__name__}: {e}")
            return
        adapter._event_bus = _NobodyListens()
        with self._lock:
            self._adapter = adapter

    def _collect(self) -> None:
        """Wait a moment for results, and hand out what has come."""
        adapter = self._adapter
        poller = select.poll()
        fds = (adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd())
        for fd in (*fds, self._wake.fileno()):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(_TICK_MS):
            try:
                consume_fd(fd)
            except OSError:
                pass
        done: list[tuple[Future[Any], Any]] = []
        with self._lock:
            for task, stored in adapter.pop_completed_store_tasks().items():
                future, _, _ = self._pending.pop(("store", task), (None, 0, None))
                if future is not None:
                    done.append((future, bool(stored.is_successful())))
            for (kind, task), (future, count, _) in list(self._pending.items()):
                found = None
                if kind == "lookup":
                    found = adapter.query_lookup_and_lock_result(task)
                elif kind == "load":
                    found = adapter.query_load_result(task)
                if found is not None:
                    del self._pending[kind, task]
                    bits = _bits(found, count)
                    done.append((future, bits if kind == "lookup" else bits == [True]))
        for future, result in done:
            future.set_result(result)

    def say_up(self) -> None:
        if not self._up.is_set() or self._suspect:
            logger.info("lmcache_nvme_backend: the store behind (%s) answers", self.name)
        self._suspect = False
        self._up.set()

    def say_down(self, why: str) -> None:
        if self._up.is_set() or why != self._why:
            logger.warning(
                "lmcache_nvme_backend: the store behind (%s) does not work, so only this host's chunks are served: %s",
                self.name, why or self._why,
            )  # fmt: skip
        self._why = why
        self._up.clear()

    def renew(self) -> None:
        """Give this client up; the next turn makes another. Not while an earlier one still hangs in its end: a store
        that is stuck for hours must not cost a client every few seconds."""
        if self._closing is None or not self._closing.is_alive():
            self._drop_adapter()

    def _drop_adapter(self) -> None:
        """What was pending is lost, but for its buffers: those are free once the old client has ended, as far as can be
        known. Some adapters leave threads behind that hang in the kernel, with an address in their hands: so the memory
        stays where it is, and what comes out of it is verified elsewhere."""
        with self._lock:
            adapter, self._adapter = self._adapter, None
            pending, self._pending = self._pending, {}
        self._abandoned.update((id(obj), obj) for _, _, obj in pending.values() if obj is not None)
        if adapter is None:
            return

        def end() -> None:
            try:
                adapter.close()
            except Exception:
                logger.exception("lmcache_nvme_backend: closing the store behind (%s)", self.name)
            for (kind, _), (future, _, _) in pending.items():
                future.set_result([] if kind == "lookup" else False)

        self._closing = threading.Thread(target=end, name="kvtier-behind-close", daemon=True)
        self._closing.start()
        if self._stop.is_set():
            self._closing.join(_CLOSE_WAIT_S)

    @property
    def suspected(self) -> bool:
        return self._suspect

    def _notify(self) -> None:
        with self._waking:  # a descriptor that is closed may be somebody else's by now
            if not self._closed:
                self._wake.notify()

    def close(self) -> None:
        """Idempotent. A client that hangs in its end is left behind, with the descriptor that its thread waits on."""
        self._stop.set()
        self._notify()
        self._thread.join(_CLOSE_WAIT_S + PROBE_DOWN_S)
        with self._waking:
            if not self._closed and not self._thread.is_alive():
                self._closed = True
                self._wake.close()


class _NobodyListens:
    """In the place of LMCache's event bus, which would take what happens behind for its own objects: a coordinator
    would count them a second time, and refuses whole batches of events for a name that an adapter in here lacks."""

    def publish(self, event: Any) -> None:
        pass


class _Probe:
    """Stores and looks up one small object, without ever waiting for it."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        host = blake2b(socket.gethostname().encode(), digest_size=16).digest()
        self._key = ObjectKey(host, "kvtier-probe", 0)
        self._buffer = Buffer(_PROBE_BYTES)
        self._ended = float("-inf")  # when the last one had its answer, or none in time
        self._worked = False
        self._deadline = 0.0
        self._future: Future[Any] | None = None
        self._storing = False
        self._failures = 0

    def step(self) -> None:
        now = time.monotonic()
        if self._future is None:
            well = self._worked and not self._remote.suspected
            if now >= self._ended + (PROBE_UP_S if well else PROBE_DOWN_S):
                self._begin(now)
            return
        if self._future.done():
            result = self._future.result()
            if self._storing and result:
                self._storing = False
                self._send(lambda adapter: adapter.submit_lookup_and_lock_task([self._key], {}), "lookup")
            else:
                self._end(bool(result) and (result is True or all(result)), "it does not keep what is stored")
        elif now >= self._deadline:
            self._end(False, f"no answer within {PROBE_WAIT_S:g} s")

    def _begin(self, now: float) -> None:
        self._deadline = now + PROBE_WAIT_S
        self._storing = True
        self._send(lambda adapter: adapter.submit_store_task([self._key], [self._buffer.obj]), "store")

    def _send(self, submit: Callable[[Any], int], kind: Kind) -> None:
        self._future = self._remote._submit(kind, submit, [self._key] if kind == "lookup" else None)
        if self._future is None:
            self._end(False, "it takes no requests")

    def _end(self, worked: bool, why: str) -> None:
        self._future = None
        self._ended, self._worked = time.monotonic(), worked
        if worked:
            self._failures = 0
            self._remote.say_up()
            return
        self._failures += 1
        self._remote.say_down(why)
        if self._failures >= PROBES_A_CLIENT:
            self._failures = 0
            self._remote.renew()


def _unlock(adapter: Any, keys: Sequence[Any], found: Sequence[bool]) -> None:
    """Nothing there is evicted by this host, so nothing has to stay locked."""
    locked = [key for key, is_there in zip(keys, found, strict=False) if is_there]
    try:
        if locked:
            adapter.submit_unlock(locked)
    except Exception:
        logger.exception("lmcache_nvme_backend: unlocking in the store behind")


def _bits(bitmap: Any, count: int) -> list[bool]:
    set_bits = bitmap.get_indices_set()
    return [i in set_bits for i in range(count)]
