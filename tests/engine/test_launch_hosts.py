"""The plan for two hosts, run on two: network, processes, /dev/shm and /tmp of their own, one rank each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtier.detect.box import look
from kvtier.facts import Node
from kvtier.observe.snapshot import Snapshot, take
from kvtier.plan.decide import plan
from kvtier.plan.result import NodePlan, Plan
from kvtier.plan.wishes import Wishes
from kvtier.process import KeptProcess
from kvtier.render.formats import as_yaml, host
from kvtier.scrape import Metrics
from tests.engine.support.hosts import Host, pair, possible
from tests.engine.support.installed import python_path

pytest.importorskip("vllm", reason="needs vLLM")
pytest.importorskip("lmcache", reason="needs LMCache")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not possible(), reason="needs root, ip, unshare and nsenter for network namespaces"),
]

READY_S = 420.0
URL = "http://127.0.0.1:8000"
PROMPT = [20 + (7 * index) % 220 for index in range(600)]
STORED = 512
"""Two chunks of 256."""
RECOVERED = "Recovered from KV load failure: 1 request(s) rescheduled"
"""What vLLM's scheduler says when it recomputes. (Its metrics count the tokens that were promised.)"""


class Running(msgspec.Struct):
    """One host's part, running."""

    host: Host
    node: NodePlan
    process: KeptProcess

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host."""
        env = {**os.environ, "PYTHONPATH": python_path(self.host.tmp / "site")}
        return subprocess.run(
            self.host.beside(self._main(), list(words)), env=env, capture_output=True, text=True, check=False
        )

    def fetch(self, method: str, path: str, body: object = None) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tests.engine.support.fetch", method, URL + path]
        return self.inside(*words, *([json.dumps(body)] if body is not None else []))

    def _main(self) -> int:
        for pid in self.process.processes():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"tests.engine.support.serve" in command and command[0].endswith(b"python"):
                return pid
        raise AssertionError(f"{self.host.name} does not run:\n{self.process.log_tail(40)}")


class Pair(msgspec.Struct):
    """Both, and what is asked of rank 0."""

    plan: Plan
    ranks: list[Running]

    def ask(self) -> str:
        """The text of a greedy completion."""
        body = {"model": self.plan.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        done = self.ranks[0].fetch("POST", "/v1/completions", body)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["choices"][0]["text"])

    def metrics(self) -> Snapshot:
        return take(Metrics(self.ranks[0].fetch("GET", "/metrics").stdout))

    def forget(self) -> None:
        """Empty the pool's prefix cache, so that only a tier can serve."""
        assert self.ranks[0].fetch("POST", "/reset_prefix_cache").returncode == 0

    def chunks(self, rank: int) -> list[Path]:
        return sorted((self.ranks[rank].host.tmp / "kv").rglob("*.kv"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A tiny model over two hosts with the plan's arguments, environment and LMCache files."""
    from kvtier.model import find_model

    model = str(find_model("random", print))
    folder = tmp_path_factory.mktemp("hosts")
    with pair(folder) as hosts:
        nodes = tuple(Node(name=each.name, address=each.address, interface=each.interface) for each in hosts)
        wishes = Wishes(nvme="/tmp/kv", nvme_gib=1, max_model_len=1024, nodes=nodes, lmcache_file="/tmp/lmcache.yaml")
        made = plan(look(), model, wishes)
        ranks: list[Running] = []
        try:
            for each, node in zip(hosts, made.nodes, strict=True):
                ranks.append(Running(each, node, _start(each, node, made, folder)))
            both = Pair(made, ranks)
            _wait(both)
            yield both
        finally:
            for running in ranks:
                running.process.stop()


def _start(each: Host, node: NodePlan, made: Plan, folder: Path) -> KeptProcess:
    (each.tmp / "lmcache.yaml").write_text(as_yaml(made, host(made, node.rank)))
    (each.tmp / "kv" / f"rank-{node.rank}").mkdir(parents=True)
    python_path(each.tmp / "site")
    env = {
        **os.environ,
        **node.env,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(node.rank % (os.cpu_count() or 1)),
        "PYTHONPATH": python_path(each.tmp / "site").replace(str(each.tmp), "/tmp"),
    }
    words = [sys.executable, "-m", "tests.engine.support.serve", "serve", made.model, *node.vllm_args]
    words += ["--enforce-eager", "--max-num-batched-tokens", "1024", "--block-size", "128"]
    return KeptProcess(each.command(words), env, folder / f"rank-{node.rank}.log", grace_s=5.0)


def _wait(both: Pair) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        for running in both.ranks:
            assert running.process.returncode() is None, running.process.log_tail(60)
        try:
            if both.ranks[0].fetch("GET", "/health").returncode == 0:
                return
        except AssertionError:
            pass  # the namespace's main process is not there yet
        time.sleep(1.0)
    raise AssertionError("\n".join(running.process.log_tail(40) for running in both.ranks))


def test_each_rank_stores_on_its_own_host_and_serves(two: Pair) -> None:
    """Cold, then with an emptied pool: rank 0 alone is asked, both ranks load their own part, and the text is equal."""
    cold = two.ask()
    end = time.monotonic() + 20
    while min(len(two.chunks(0)), len(two.chunks(1))) < STORED // 256 and time.monotonic() < end:
        time.sleep(0.2)
    assert len(two.chunks(0)) == len(two.chunks(1)) == STORED // 256
    before = two.metrics()
    two.forget()
    assert two.ask() == cold
    assert two.metrics().from_tier - before.from_tier == STORED


def test_lost_cache_of_one_host_is_recomputed(two: Pair) -> None:
    """With rank 1's chunks deleted, rank 0's scheduler hears of the failed load and recomputes: the same text."""
    two.forget()
    expected = two.ask()
    assert RECOVERED not in two.ranks[0].process.log.read_text()
    for path in two.chunks(1):
        path.unlink()
    two.forget()
    assert two.ask() == expected
    assert RECOVERED in two.ranks[0].process.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_environment_reached_each_host(two: Pair, rank: int) -> None:
    """The plan's own check, run on each host, passes there, and fails for a value that was not given."""
    running = two.ranks[rank]
    words = running.node.check.split(" kvtier ", 1)[1].split()
    done = running.inside(sys.executable, "-m", "kvtier.cli", *words)
    assert done.returncode == 0, done.stdout
    assert "VLLM::Worker" in done.stdout
    wrong = running.inside(sys.executable, "-m", "kvtier.cli", "doctor", "--engine-env", "--expect", "PYTHONHASHSEED=9")
    assert wrong.returncode == 1
