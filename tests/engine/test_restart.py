"""A prompt survives its engine: killed, started again, beside another one on the same root, in a pool too small."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import CHUNK, start_together, text
from .support.adapters import write_adapter
from .support.served import kvtier

PROMPT = text(700, seed=1)
# 135 blocks of 32 tokens: a prompt of this file fits, and so do three of some 1,200 tokens, but not with their answers.
ADAPTERS = ("red", "blue")
SMALL_POOL = ("--block-size", "32", "--num-gpu-blocks-override", "135", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def life(start_engine, model, tmp_path_factory):
    """One engine asked twice and killed in the middle of the day; at once two new ones on its root.

    PYTHONHASHSEED is not set: under sha256_cbor the keys are stable without it.
    """
    root, adapters = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("adapters")
    told = {}
    modules = [f"{name}={write_adapter(adapters / name, model, seed)}" for seed, name in enumerate(ADAPTERS)]
    lora = ("--enable-lora", "--max-loras", "2", "--lora-modules", *modules)
    spec = {"env": {"PYTHONHASHSEED": None}, "args": (*SMALL_POOL, *lora)}
    with start_engine(root, **spec) as first:
        told["cold"] = first.ask(PROMPT)
        told["repeat"] = first.ask(PROMPT)
        first.wait_stored()
        told["first log"] = first.log()
        first.engine.kill()
    with start_together([lambda: start_engine(root, **spec)] * 2) as (told["second"], told["third"]):
        yield told


def test_the_answer_is_the_same_cold_repeated_and_after_a_kill(life):
    """Cold, from vLLM's own pool, and from disk after SIGKILL and an immediate new start: equal text."""
    answer, tokens = life["second"].from_tier(PROMPT)
    assert life["cold"].text == life["repeat"].text == answer.text
    assert tokens >= 0.95 * answer.prompt_tokens // CHUNK * CHUNK > 0


def test_two_engines_serve_from_one_root_at_the_same_time(life):
    """The second engine of the same model finds what the dead one left, and what its neighbour stores now."""
    answer, tokens = life["third"].from_tier(PROMPT)
    assert answer.text == life["cold"].text and tokens > 0
    fresh = text(500, seed=2)
    stored = life["second"].ask(fresh)
    life["second"].wait_stored()
    answer, tokens = life["third"].from_tier(fresh)
    assert answer.text == stored.text
    assert tokens >= 4 * CHUNK


def test_stable_keys_are_not_warned_about(life):
    """With sha256_cbor and no PYTHONHASHSEED the keys survive, so nothing is said."""
    assert "PYTHONHASHSEED is not set" not in life["first log"]


def test_preempted_requests_reload_and_end_with_equal_text(life):
    """Three requests whose answers do not fit into the pool together: what vLLM preempts loses its blocks to those
    that run on, reloads them from NVMe, and ends as it does alone."""
    engine = life["second"]
    prompts = [text(250, seed=30 + i) for i in range(3)]
    alone = []
    for prompt in prompts:
        alone.append(engine.ask(prompt, max_tokens=500, ignore_eos=True))
        engine.wait_stored()
    engine.forget()
    preempted = engine.engine.metrics().value("vllm:num_preemptions_total")
    tokens = engine.tokens("external_kv_transfer")
    loaded = engine.metric("kvtier_chunks_loaded_total")
    failed = engine.metric("kvtier_chunks_load_failed_total")
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda p: engine.ask(p, max_tokens=500, ignore_eos=True), prompts))
    assert engine.engine.metrics().value("vllm:num_preemptions_total") > preempted
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    # Each prompt once from disk, and at least one of them again after its preemption.
    assert engine.metric("kvtier_chunks_loaded_total") > loaded + sum(a.prompt_tokens // CHUNK for a in alone)
    assert engine.tokens("external_kv_transfer") > tokens
    assert engine.metric("kvtier_chunks_load_failed_total") == failed


DAMAGE = {
    "removed": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: path.write_bytes(_flipped(path.read_bytes())),
}


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_chunk_damaged_between_lookup_and_load_is_recomputed(life, damage):
    """The lookup has promised it; the load finds out; the request completes with the right text."""
    engine = life["second"]
    prompt = text(600, seed=10 + list(DAMAGE).index(damage))
    before = set(engine.chunks())
    right = engine.ask(prompt)
    engine.wait_stored()
    fresh = [path for path in engine.chunks() if path not in before]
    assert len(fresh) >= 5
    engine.forget()
    DAMAGE[damage](fresh[2])
    failed = engine.metric("kvtier_chunks_load_failed_total")
    corrupt = engine.metric("kvtier_chunks_corrupt_total")
    answer = engine.ask(prompt)
    assert answer.text == right.text
    assert engine.metric("kvtier_chunks_load_failed_total") == failed + 1
    assert engine.metric("kvtier_chunks_corrupt_total") == corrupt + (damage != "removed")
    engine.forget()
    answer, tokens = engine.from_tier(prompt)
    assert answer.text == right.text and tokens >= 5 * CHUNK


def test_what_was_computed_on_a_failed_load_is_never_served(life):
    """A cached prefix with a damaged chunk, and a long new part behind it that the failing step computes on nothing.

    A salted request, which shares with nobody, says what the right answer is.
    """
    engine, prefix = life["second"], text(400, seed=40)
    before = set(engine.chunks())
    engine.ask(prefix)
    engine.wait_stored()
    fresh = [path for path in engine.chunks() if path not in before]
    prompt = prefix + " " + text(200, seed=41)
    right = engine.ask(prompt, cache_salt="reference")
    assert right.prompt_tokens // CHUNK >= len(fresh) + 2
    engine.forget()
    DAMAGE["flipped"](fresh[1])
    failed = engine.metric("kvtier_chunks_load_failed_total")
    assert engine.ask(prompt).text == right.text
    assert engine.metric("kvtier_chunks_load_failed_total") == failed + 1
    engine.wait_stored()
    for _ in range(2):
        engine.forget()
        answer, _ = engine.from_tier(prompt)
        assert answer.text == right.text
        engine.wait_stored()


def test_salts_do_not_share(life):
    """cache_salt isolates tenants in vLLM's pool; the tier keeps them apart as well."""
    engine, prompt = life["second"], text(500, seed=20)
    salted = engine.ask(prompt, cache_salt="one")
    engine.wait_stored()
    engine.forget()
    for salt, found in ({"cache_salt": "two"}, False), ({}, False), ({"cache_salt": "one"}, True):
        engine.forget()
        answer, tokens = engine.from_tier(prompt, **salt)
        assert answer.text == salted.text
        assert (tokens > 0) is found
        engine.wait_stored()


def test_adapters_do_not_share(life):
    """One prompt on the base model and on two LoRA adapters: each is served its own KV and says its own text."""
    engine, prompt = life["second"], text(500, seed=21)
    models = [None, *ADAPTERS]
    right = {}
    for model in models:
        engine.forget()
        right[model], tokens = engine.from_tier(prompt, **({"model": model} if model else {}))
        assert tokens == 0
        engine.wait_stored()
    assert len({answer.text for answer in right.values()}) == len(models)
    for model in models:
        engine.forget()
        answer, tokens = engine.from_tier(prompt, **({"model": model} if model else {}))
        assert answer.text == right[model].text
        assert tokens >= 4 * CHUNK


def test_the_tier_tests_itself_before_it_serves(life):
    """Each engine's start carried a chunk through the tier and compared it."""
    assert life["first log"].count("self-test passed") == 1
    assert life["second"].log().count("self-test passed") == 1


def test_the_engines_own_metrics_tell_what_the_tier_does(life):
    """A scrape of /metrics, an hour later or now: hits, misses, drops, damage, bytes, room, and whether it serves."""
    engine = life["second"]
    metrics = engine.engine.metrics()
    assert metrics.value("kvtier_chunks_hit_total", rank="0") > 0
    assert metrics.value("kvtier_chunks_missed_total", rank="0") > 0
    assert metrics.value("kvtier_chunks_dropped_total", cause="staging full") == 0
    assert metrics.value("kvtier_bytes_read_total") > 0
    assert metrics.value("kvtier_bytes_written_total") > 0
    assert metrics.value("kvtier_degraded") == 0
    assert metrics.value("kvtier_quota_bytes") == 2 * 2**30
    on_disk = sum(path.stat().st_size for path in engine.chunks())
    assert 0 < on_disk <= engine.metric("kvtier_used_bytes") <= 2 * 2**30
    assert metrics.value("vllm:num_requests_running") == 0


def test_lmcache_holds_no_cpu_cache(life):
    """No RAM is taken from the model: LMCache says so itself, and the staging ring is what it is."""
    assert "No cpu memory is allocated" in life["first log"]
    assert life["second"].engine.metrics().value("kvtier_staging_bytes") == 256 * 2**20


def test_the_directory_is_private(life):
    """KV encodes prompts."""
    for path in [life["second"].root / "v1", *life["second"].root.glob("v1/**/*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_namespace_is_told_in_words(life):
    """namespace.json says which model, layout and seed a folder belongs to; both lives had the same one."""
    import json

    (told,) = life["second"].root.glob("v1/*/namespace.json")
    facts = json.loads(told.read_text())["facts"]
    assert facts["model"].startswith("weights:") and facts["chunk_tokens"] == CHUNK
    assert re.fullmatch(r"[0-9a-f]{16}", facts["none_hash"])


def test_the_store_command_looks_checks_and_prunes_beside_an_engine_that_serves(life):
    """To the engine what goes is a miss: every answer given meanwhile is right, nothing is found bad, and what it
    stores anew is found again."""
    engine, prompt = life["second"], text(500, seed=50)
    right = engine.ask(prompt)
    engine.wait_stored()
    (namespace,) = (path.parent.name for path in engine.root.glob("v1/*/namespace.json"))
    stop = threading.Event()

    def serve() -> list[str]:
        said = []
        while not stop.is_set():
            engine.forget()
            said.append(engine.ask(prompt).text)
        return said

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            for command, *options in (
                ["inspect"], ["verify", "--remove-bad"], ["prune", "--namespace", namespace[:8], "--yes"], ["verify"],
                ["prune", "--keep-gib", "0", "--yes"], ["inspect"],
            ):  # fmt: skip
                done = subprocess.run(
                    kvtier("store", command, str(engine.root), *options), capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, done.stdout + done.stderr
        finally:
            stop.set()
        said = serving.result()
    assert len(said) > 1 and set(said) == {right.text}
    engine.wait_stored()
    engine.forget()
    engine.ask(prompt)
    engine.wait_stored()
    engine.forget()
    answer, tokens = engine.from_tier(prompt)
    assert answer.text == right.text and tokens >= 5 * CHUNK
