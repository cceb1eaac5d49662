"""Two engines on one host with one cache directory: real LMCache in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .conftest import CHUNK, PagedKv, prompt

PROJECT = Path(__file__).parents[2]
TOKENS = 6 * CHUNK
OURS, THEIRS, AFTERWARDS = 1, 2, 3  # seeds of prompts and of the KV that belongs to them

# Stores what it is told to (a seed a line), and looks up and loads what the other one has stored.
OTHER_ENGINE = f"""
import sys, torch
from pathlib import Path
from tests.integration.conftest import Lmcache, PagedKv, lmcache_config, lmcache_metadata, prompt
engine = Lmcache(lmcache_config(Path(sys.argv[1])), lmcache_metadata())
print("ready", flush=True)
for line in sys.stdin:
    what, seed = line.split()
    tokens, kv = prompt({TOKENS}, seed=int(seed)), PagedKv({TOKENS}, seed=int(seed))
    if what == "store":
        engine.store(tokens, kv, request=line)
        engine.settle()
        print("stored", flush=True)
    else:
        found = engine.lookup(tokens, request=line)
        loaded = engine.retrieve(tokens, kv, request=line)
        right = all(torch.equal(a, b) for a, b in zip(kv.content(0), kv.content(1)))
        print(found, loaded, right, flush=True)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_ENGINE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=PROJECT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, sys.path)])},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def told(process: subprocess.Popen[str], line: str) -> str:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that is not LMCache's log."""
    for line in process.stdout:
        if line.startswith(("ready", "stored", *"0123456789")):
            return line.strip()
    raise AssertionError("the other engine has ended")


def test_two_engines_serve_each_others_chunks_also_after_one_is_killed(lmcache, other):
    """Nobody tells either: the next lookup finds what the other has stored, and loads it bit for bit."""
    one = lmcache()
    assert answer(other) == "ready"
    kv = {seed: PagedKv(TOKENS, seed=seed) for seed in (OURS, THEIRS, AFTERWARDS)}
    tokens = {seed: prompt(TOKENS, seed=seed) for seed in kv}

    one.store(tokens[OURS], kv[OURS])
    one.settle()
    assert told(other, f"load {OURS}") == f"{TOKENS} {TOKENS} True"

    assert one.lookup(tokens[THEIRS], request="early") == 0
    assert told(other, f"store {THEIRS}") == "stored"
    assert one.lookup(tokens[THEIRS], request="theirs") == TOKENS
    assert one.retrieve(tokens[THEIRS], kv[THEIRS], request="theirs") == TOKENS

    assert told(other, f"store {AFTERWARDS}") == "stored"
    other.kill()
    other.wait()
    assert one.lookup(tokens[AFTERWARDS], request="after") == TOKENS
    assert one.retrieve(tokens[AFTERWARDS], kv[AFTERWARDS], request="after") == TOKENS
    for seed in (THEIRS, AFTERWARDS):
        assert all(torch.equal(a, b) for a, b in zip(kv[seed].content(0), kv[seed].content(1), strict=True))
