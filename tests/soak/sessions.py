"""Concurrent multi-turn sessions: what agents do."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtier.engine import Engine, EngineRequestError

SESSIONS = 4
ANSWER_TOKENS = 16
# A session starts with instructions that a few share, and grows until it would not fit any more.
SHARED, INSTRUCTION_WORDS, TURN_WORDS, MOST_CHARACTERS = 3, 150, 60, 3000


class Turn(msgspec.Struct, frozen=True):
    """One request and its answer."""

    prompt: str
    text: str


def words(count: int, numbers: random.Random) -> str:
    return " ".join(f"{numbers.choice('abcdefgh')}{numbers.randrange(10_000)}" for _ in range(count))


class Sessions:
    """Sessions that follow each other on a few threads until the time is over."""

    def __init__(self, engine: Engine, seconds: float, seed: int) -> None:
        self.turns: list[Turn] = []
        self.failures: list[str] = []
        self._engine, self._end, self._seed = engine, time.monotonic() + seconds, seed
        self._lock = threading.Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(SESSIONS) as pool:
            list(pool.map(self._work, range(SESSIONS)))

    def _work(self, worker: int) -> None:
        numbers = random.Random(self._seed * 1000 + worker)
        while time.monotonic() < self._end:
            group = random.Random(numbers.randrange(SHARED))
            history = words(INSTRUCTION_WORDS, group)
            while len(history) < MOST_CHARACTERS and time.monotonic() < self._end:
                history += "\n" + words(TURN_WORDS, numbers)
                history += self._turn(history)

    def _turn(self, prompt: str) -> str:
        try:
            text = self._engine.complete(prompt, ANSWER_TOKENS, ignore_eos=True).text
        except (EngineRequestError, OSError) as error:
            with self._lock:
                self.failures.append(str(error))
            return ""
        with self._lock:
            self.turns.append(Turn(prompt, text))
        return text
