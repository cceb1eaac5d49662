"""LMCache's own multi-process server with NvmeL2Adapter, and vLLM on the CPU: both restarted, the prompt is served."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import httpx
import pytest

from kvtier.engine import Engine, EngineSpec
from kvtier.lmcache_server import LmcacheServer, LmcacheServerSpec, nvme_adapter
from tests.integration.mp.redis_server import Redis

from .conftest import CHUNK, text

# Five servers and five engines; `make test` has the adapter in LMCache's own storage manager (tests/integration/mp).
pytestmark = pytest.mark.long

PROMPT, DAMAGED = text(700, seed=1), text(500, seed=2)
# Small blocks, as the default of the CPU, and float32, so that batching never changes a greedy token.
ARGS = ("--dtype", "float32")


class Stack:
    """One engine and its LMCache server."""

    def __init__(self, server: LmcacheServer, engine: Engine) -> None:
        self.server, self.engine = server, engine

    def ask(self, prompt: str, **body: object):
        """The answer's text, and the prompt tokens that came from LMCache."""
        before = self._external()
        answer = self.engine.complete(prompt, 12, **body)
        return answer, int(self._external() - before)

    def _external(self) -> float:
        return self.engine.metrics().value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        httpx.post(f"{self.engine.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def stored(self, chunks: int, counter: str = "kvtier_chunks_stored_total") -> None:
        """Wait until the tier has written so many chunks."""
        deadline = time.monotonic() + 30
        while (self.server.metrics().get(counter) or 0) < chunks:
            assert time.monotonic() < deadline, "the chunks do not arrive"
            time.sleep(0.2)


@contextmanager
def stack(folder, model, root, **params):
    folder.mkdir(exist_ok=True)
    adapter = nvme_adapter(root, 1, staging_mib=64, **params)
    with LmcacheServer(LmcacheServerSpec(log=folder / "server.log", l2_adapters=(adapter,))) as server:
        spec = EngineSpec(
            model=model,
            log=folder / "engine.log",
            max_model_len=4096,
            max_num_batched_tokens=1024,
            args=("--kv-transfer-config", json.dumps(server.kv_transfer), *ARGS),
            env={"VLLM_SERVER_DEV_MODE": "1"},
            ready_timeout_s=600,
        )
        with Engine(spec) as engine:
            yield Stack(server, engine)


def chunks(root):
    return set(root.glob("v1/*/*/*.kv"))


def depth(path):
    return int(path.name.split("-")[1], 16)


def damage(path):
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def lives(model, tmp_path_factory):
    """A first life: cold, repeated, stored. A bit of another prompt's third chunk is flipped. Then a new server and a
    new engine on the same root."""
    folder, root = tmp_path_factory.mktemp("mp"), tmp_path_factory.mktemp("root")
    told = {}
    with stack(folder / "first", model, root) as first:
        told["cold"], told["cold tokens"] = first.ask(PROMPT)
        told["repeat"], _ = first.ask(PROMPT)
        first.stored(told["cold"].prompt_tokens // CHUNK)
        before = chunks(root)
        told["right"], _ = first.ask(DAMAGED)
        first.stored(len(before) + told["right"].prompt_tokens // CHUNK)
        damage(sorted(chunks(root) - before, key=depth)[2])
    with stack(folder / "second", model, root) as told["second"]:
        told["root"] = root
        yield told


def test_the_answer_is_the_same_after_a_restart_of_both(lives):
    """Cold, from vLLM's own pool, and from disk through a new server into a new engine: equal text."""
    answer, tokens = lives["second"].ask(PROMPT)
    assert lives["cold tokens"] == 0
    assert lives["cold"].text == lives["repeat"].text == answer.text
    assert tokens >= 0.95 * answer.prompt_tokens // CHUNK * CHUNK > 0
    metrics = lives["second"].server.metrics()
    assert metrics.value("kvtier_chunks_loaded_total") >= tokens // CHUNK
    assert metrics.value("kvtier_degraded") == 0


def test_a_damaged_file_costs_a_prefill_and_nothing_else(lives):
    """The chunks before it are served, it is removed and counted, the answer is right, and it is stored anew."""
    second, corrupt = lives["second"], "kvtier_chunks_corrupt_total"
    before = second.server.metrics().value(corrupt)
    stored = second.server.metrics().value("kvtier_chunks_stored_total")
    answer, tokens = second.ask(DAMAGED)
    assert answer.text == lives["right"].text
    assert tokens == 2 * CHUNK
    assert second.server.metrics().value(corrupt) == before + 1
    second.stored(int(stored) + 1)


def test_the_namespace_is_the_models(lives):
    """Engine and server, each started twice, proved the same model to one namespace, which says its name in words."""
    (told,) = lives["root"].glob("v1/*/namespace.json")
    described = json.loads(told.read_text())
    assert described["facts"]["door"] == "lmcache-mp" and described["facts"]["model"].startswith("engine:")
    assert described["notes"]["model"] == str(lives["second"].engine.spec.model)


def test_a_salt_keeps_tenants_apart(lives):
    """A prompt that was stored without one is not served to a tenant, nor a tenant's to another; to itself it is."""
    second = lives["second"]
    for salt, served in (("red", False), ("blue", False), ("red", True)):
        second.forget()
        answer, tokens = second.ask(PROMPT, cache_salt=salt)
        assert answer.text == lives["cold"].text
        assert tokens == (answer.prompt_tokens // CHUNK * CHUNK if served else 0), salt


def test_what_one_hosts_server_stored_the_other_hosts_serves_and_keeps(model, tmp_path):
    """Two servers with NVMe directories of their own and one Redis behind both; engine and server of the first host are
    gone when the second one is asked, and Redis is when it is asked again."""
    redis = Redis(tmp_path)
    behind = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
    try:
        with stack(tmp_path / "first", model, roots[0], behind=behind) as first:
            cold, tokens = first.ask(PROMPT)
            number = cold.prompt_tokens // CHUNK
            assert tokens == 0 and number > 4
            first.stored(number, "kvtier_behind_chunks_stored_total")
        with stack(tmp_path / "second", model, roots[1], behind=behind) as second:
            answer, tokens = second.ask(PROMPT)
            assert (answer.text, tokens) == (cold.text, number * CHUNK)
            assert second.server.metrics().value("kvtier_behind_chunks_loaded_total") == number
            second.stored(number, "kvtier_behind_chunks_kept_total")
            assert len(chunks(roots[1])) == number
        redis.stop()
        with stack(tmp_path / "third", model, roots[1], behind=behind) as third:
            answer, tokens = third.ask(PROMPT)
            assert (answer.text, tokens) == (cold.text, number * CHUNK)
            assert third.server.metrics().value("kvtier_chunks_loaded_total") >= number
    finally:
        redis.stop()
