"""What the engine answered and stored under faults, beside one that computes everything itself.

In float32 the order in which a batch is added up moves a value in its last places, and wrong KV moves it by its own
size; between the two lie orders of magnitude, so a comparison by value cannot be broken by noise. Answers are compared
as text; where they differ, they are wrong only if the reference was sure of every token it said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np

from kvtier.engine import Engine
from lmcache_nvme_backend.store import ChunkKey, ChunkStore, Hit, Namespace, StoreSettings
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.recovery import namespace_chunks
from tests.soak.sessions import ANSWER_TOKENS, SESSIONS, Turn

# Relative to the largest value of a chunk; noise stays some three orders below, wrong KV some three above.
TOLERANCE = 1e-3
# The least difference of log probability between the first and the second choice that noise cannot turn.
SURE = 1e-3


class Answers(msgspec.Struct, frozen=True):
    """How many answers were compared, and how many of those that differ are wrong or not to be decided."""

    compared: int
    wrong: list[str]
    undecided: int


def compare_answers(reference: Engine, turns: list[Turn]) -> Answers:
    """Ask the reference everything again."""
    with ThreadPoolExecutor(SESSIONS) as pool:
        texts = list(pool.map(lambda t: reference.complete(t.prompt, ANSWER_TOKENS, ignore_eos=True).text, turns))
    wrong, undecided = [], 0
    for turn, text in zip(turns, texts, strict=True):
        if turn.text == text:
            continue
        if _least_margin(reference, turn.prompt) < SURE:
            undecided += 1
        else:
            wrong.append(f"{turn.text!r} instead of {text!r}")
    return Answers(len(turns), wrong, undecided)


def _least_margin(engine: Engine, prompt: str) -> float:
    body = {"model": engine.spec.served_name, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body | {"logprobs": 2, "ignore_eos": True}, timeout=120)
    choices = answer.raise_for_status().json()["choices"][0]["logprobs"]["top_logprobs"]
    margins = []
    for tokens in choices:
        first, second = sorted(tokens.values(), reverse=True)[:2]
        margins.append(first - second)
    return min(margins)


class Chunks(msgspec.Struct, frozen=True):
    """Chunks that both directories hold: how many, the largest difference, and how many differ by more than noise."""

    compared: int
    largest_difference: float
    wrong: int


def compare_chunks(root: Path, reference: Path) -> Chunks:
    """Compare by value what both engines stored under the same keys. No engine runs on either any more."""
    compared, largest, wrong = 0, 0.0, 0
    with _opened(root) as (found, keys), _opened(reference) as (computed, _):
        for key, nbytes in keys:
            payload, right = _floats(found, key, nbytes), _floats(computed, key, nbytes)
            if payload is None or right is None:
                continue
            difference = float(np.abs(payload - right).max() / max(np.abs(right).max(), 1e-9))
            compared, largest = compared + 1, max(largest, difference)
            wrong += not difference < TOLERANCE
    return Chunks(compared, largest, wrong)


@contextmanager
def _opened(root: Path) -> Iterator[tuple[ChunkStore, list[tuple[ChunkKey, int]]]]:
    """The one namespace under ``root``, and its keys with the most bytes that their chunks can have."""
    (told,) = root.glob("v1/*/namespace.json")
    namespace = Namespace(json.loads(told.read_text())["facts"])
    keys = [(key, blocks * BLOCK) for key, _, blocks in namespace_chunks(str(told.parent))]
    with ChunkStore.open(root, namespace, StoreSettings(quota_bytes=1 << 40, direct_io="off")) as store:
        yield store, keys


def _floats(store: ChunkStore, key: ChunkKey, nbytes: int) -> np.ndarray | None:
    """A chunk's values, or ``None`` where it is not there or does not prove itself."""
    buffer = bytearray(nbytes)
    result = store.get(key, memoryview(buffer))
    return np.frombuffer(buffer, np.float32, result.nbytes // 4) if isinstance(result, Hit) else None
