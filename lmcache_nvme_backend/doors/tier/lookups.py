"""Whether chunks are here, answered on vLLM's scheduler thread without ever waiting for the disk.

What the index has is there, at once. What it has not may have been stored by another engine since: that question goes
to a thread of its own once a step, and vLLM asks again. The same thread tells the store, once a request, which prefix
was asked for: that is what keeps it, and what the order of eviction learns from.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from queue import SimpleQueue

import msgspec

from lmcache_nvme_backend.doors.counts import Counts
from lmcache_nvme_backend.doors.tier.requests import RequestPrefix
from lmcache_nvme_backend.store import ChunkStore

logger = logging.getLogger("vllm.lmcache_nvme_backend")

CLOSE_WAIT_S = 5.0
# A request waits this long for an answer: a disk that works gives it in milliseconds, and with one that hangs vLLM
# would ask for ever. Then the chunk is missing, and the prompt is computed.
ANSWER_WAIT_S = 10.0


class _Asked(msgspec.Struct, gc=False):
    """What one request has asked for."""

    prefix: RequestPrefix
    verdicts: dict[bytes, bool | None] = {}  # offload key -> there or not; None: being looked for
    fresh: list[bytes] = []  # to be looked for from the end of this step on
    hits: int = 0  # found since the last step
    told: bool = False  # whether the store has been told of the prefix
    asked_at: float = 0.0  # when something that was not known was asked for last


# A request's id, its prefix, keys to look for, whether the prefix is to be told.
_Question = tuple[str, RequestPrefix, list[bytes], bool]


class Lookups:
    """`begin`, `ask`, `flush`, `failed`, `stored` and `forget` belong to the scheduler's thread and do not wait."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._known = store.known
        self._asked: dict[str, _Asked] = {}
        self._due: dict[str, _Asked] = {}  # what the end of this step has to see to
        self._questions: SimpleQueue[list[_Question] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[str, RequestPrefix, dict[bytes, bool | None]]] = SimpleQueue()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._run, name="kvtier-lookup", daemon=True)
        self._thread.start()

    def begin(self, request_id: str, prefix: RequestPrefix) -> None:
        """A new request: what it asks for is in use, also where it never gets here, since vLLM's own memory has it."""
        self._asked[request_id] = self._due[request_id] = _Asked(prefix)

    def ask(self, request_id: str, prefix: RequestPrefix, key: bytes) -> bool | None:
        """Whether a chunk is here; None: ask again after the next step."""
        if not self._answers.empty():
            self._take_answers()
        asked = self._asked.get(request_id)
        if asked is None:
            self.begin(request_id, prefix)
            asked = self._asked[request_id]
        verdict = asked.verdicts.get(key, False)
        if verdict is None and time.monotonic() - asked.asked_at > ANSWER_WAIT_S:
            asked.verdicts[key] = False  # an answer that comes later is too late
            return False
        if verdict is not False or key in asked.verdicts:
            return verdict
        found = prefix.resolved and self._known(prefix.key(key))
        self._due[request_id] = asked
        if found:
            asked.hits += 1
            asked.verdicts[key] = True
            return True
        asked.verdicts[key] = None
        asked.fresh.append(key)
        asked.asked_at = time.monotonic()
        return None

    def flush(self) -> None:
        """The step is over: look for what was not known."""
        self._take_answers()
        questions: list[_Question] = []
        due, self._due = self._due, {}
        for request_id, asked in due.items():
            if asked.hits:
                self.counts.add("hit", asked.hits)
                asked.hits = 0
            if asked.fresh or not asked.told:
                questions.append((request_id, asked.prefix, asked.fresh, not asked.told))
                asked.fresh, asked.told = [], True
        if questions:
            self._questions.put(questions)

    def failed(self, request_id: str, keys: Iterable[bytes]) -> None:
        """These could not be loaded: for this request they are not here, or it would ask for them for ever; nor for
        others that have been told they were."""
        keys = list(keys)
        for other, asked in self._asked.items():
            for key in keys:
                if other == request_id or key in asked.verdicts:
                    asked.verdicts[key] = False

    def stored(self, request_id: str, keys: Iterable[bytes]) -> None:
        """These are here now, should the request be preempted and ask again."""
        if (asked := self._asked.get(request_id)) is not None:
            for key in keys:
                asked.verdicts.pop(key, None)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._asked.pop(request_id, None)  # what is due of it still is

    def close(self) -> None:
        """End the thread; one that hangs in the disk is left behind."""
        self._questions.put(None)
        self._thread.join(CLOSE_WAIT_S)

    def _take_answers(self) -> None:
        while not self._answers.empty():
            request_id, prefix, verdicts = self._answers.get()
            asked = self._asked.get(request_id)
            if asked is None or asked.prefix is not prefix:
                continue  # the request is over
            for key, verdict in verdicts.items():
                if asked.verdicts.get(key, False) is None:
                    if verdict is None:
                        del asked.verdicts[key]
                    else:
                        asked.verdicts[key] = verdict

    # --- the other thread

    def _run(self) -> None:
        while (questions := self._questions.get()) is not None:
            for request_id, prefix, keys, tell in questions:
                verdicts: dict[bytes, bool | None] = dict.fromkeys(keys, False)
                try:
                    prefix.resolve()
                    verdicts = self._look(prefix, keys)
                    if tell:
                        self._tell(prefix)
                except Exception:
                    # A lookup that fails is a miss, never an end of lookups.
                    logger.exception("lmcache_nvme_backend: a lookup failed")
                self._answers.put((request_id, prefix, verdicts))

    def _look(self, prefix: RequestPrefix, keys: list[bytes]) -> dict[bytes, bool | None]:
        """By key. Behind attention that is missing nothing of its group is looked for: None, to be asked anew if
        vLLM should ever come to it. (Of a request that is not known the order is not, either.)"""
        verdicts: dict[bytes, bool | None] = {}
        missing: set[int] = set()
        for key in keys:
            group = prefix.attention_of(key) if prefix.hashes else None
            if group in missing:
                verdicts[key] = None
                continue
            verdicts[key] = self._store.known(prefix.key(key), look=True, depth=prefix.place(key).depth)
            self.counts.add("hit" if verdicts[key] else "missed")
            if not verdicts[key] and group is not None:
                missing.add(group)
        return verdicts

    def _tell(self, prefix: RequestPrefix) -> None:
        """A use of what of the prefix a load can reach."""
        hashes = prefix.hashes
        if not hashes:
            return
        order = prefix.order
        end = order.reach(hashes, self._store.known) if order.hybrid else order.whole(len(hashes))
        self._store.match(order.upto(hashes, end), depths=order.depths_upto(end))
