"""Real vLLM on the CPU with the plugin. Starting one takes half a minute, so tests share engines where they can."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

import httpx

from kvtier.doors import PLUGIN_TRANSFER
from kvtier.engine import Completion, Engine, EngineSpec, EngineStartError
from kvtier.model import find_model

EXAMPLE = Path(__file__).parents[2] / "configs/examples/lmcache-nvme.yaml"
CHUNK = 256


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                # A start of half a minute takes ten times as long where others have the cores.
                item.add_marker(pytest.mark.timeout(900))


def text(words: int, seed: int) -> str:
    """A prompt of some three tokens a word that no other seed shares."""
    numbers = random.Random(seed)
    return " ".join(f"{numbers.choice('abcdefgh')}{numbers.randrange(10_000)}" for _ in range(words))


class Tiered:
    """An engine with the tier, and what the tests ask it."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self.engine, self.root = engine, root

    def ask(self, prompt: str, max_tokens: int = 12, **body: Any) -> Completion:
        return self.engine.complete(prompt, max_tokens, **body)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, as a restart would."""
        httpx.post(f"{self.engine.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def from_tier(self, prompt: str, **body: Any) -> tuple[Completion, int]:
        """An answer and the prompt tokens that it took from the tier, by vLLM's own count."""
        before = self.tokens("external_kv_transfer")
        answer = self.ask(prompt, **body)
        return answer, int(self.tokens("external_kv_transfer") - before)

    def tokens(self, source: str) -> float:
        return self.engine.metrics().value("vllm:prompt_tokens_by_source_total", source=source)

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the tier, once it has come to rest (it is exported four times a second)."""
        last, deadline = None, time.monotonic() + 20
        while time.monotonic() < deadline:
            value = self.engine.metrics().get(name, **labels)
            if value is not None and value == last:
                return value
            last = value
            time.sleep(0.6)
        raise AssertionError(f"{name} {labels} does not come to rest: {last}")

    def wait_stored(self) -> None:
        """Wait for the writes behind."""
        self.metric("kvtier_chunks_stored_total")

    def chunks(self) -> list[Path]:
        """Chunk files, heads first."""
        return sorted(self.root.glob("v1/*/*/*.kv"), key=lambda p: p.name.split("-")[1])

    def log(self) -> str:
        return self.engine.spec.log.read_text(errors="replace")


def write_config(file: Path, root: Path, top: dict[str, Any] | None, nvme: dict[str, Any]) -> Path:
    """The documented entry, as it stands in configs/examples, with its place, a small quota and a test's changes."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["extra_config"] |= {"nvme.path": str(root), "nvme.quota_gib": 2}
    config["extra_config"] |= {f"nvme.{k}": v for k, v in nvme.items()}
    file.write_text(yaml.safe_dump(config | (top or {})))
    return file


@pytest.fixture(scope="session")
def model() -> Path:
    return find_model("random", lambda _: None)


Start = Callable[..., Any]


@pytest.fixture(scope="session")
def start_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A context manager that starts an engine on ``root``; keywords change the spec, the LMCache file or nvme.*."""

    @contextmanager
    def start(
        root: Path,
        *,
        env: dict[str, str | None] | None = None,
        args: tuple[str, ...] = (),
        top: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        **nvme: Any,
    ) -> Iterator[Tiered]:
        folder = tmp_path_factory.mktemp("engine")
        what = EngineSpec(
            model=model,
            log=folder / "engine.log",
            lmcache_config=write_config(folder / "lmcache.yaml", root, top, nvme),
            # float32: preemption and batching then never change a greedy token.
            args=("--dtype", "float32", *args),
            env={"VLLM_SERVER_DEV_MODE": "1", **(env or {})},
            kv_transfer={**PLUGIN_TRANSFER, **(transfer or {})},
            **{"max_model_len": 4096, "max_num_batched_tokens": 1024, "ready_timeout_s": 600, **(spec or {})},
        )
        engine = Engine(what)
        try:
            yield Tiered(engine, root)
        finally:
            engine.stop()

    return start


@contextmanager
def start_together(starts: Sequence[Callable[[], AbstractContextManager[Tiered]]]) -> Iterator[list[Tiered]]:
    """Several engines at a time: a start is mostly imports, which leave a core idle."""
    with ExitStack() as stack, ThreadPoolExecutor(len(starts)) as pool:
        yield list(pool.map(lambda start: stack.enter_context(start()), starts))


def refused(start_engine: Start, root: Path, **changes: Any) -> str:
    """Start an engine that must not start; the end of what it printed."""
    with pytest.raises(EngineStartError, match=r"exit status [1-9-]") as caught, start_engine(root, **changes):
        pass
    return str(caught.value)
