"""Ask a question about a document, ask again, restart the engine, ask again: what did each cost?"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from kvtier.cachedir import cache_dir, require_space
from kvtier.document import QUESTION, lighthouse_log
from kvtier.engine import Engine, EngineRequestError, EngineSpec
from kvtier.examples import example
from kvtier.model import find_model
from kvtier.process import IoCounters
from kvtier.report import CHUNK_TOKENS, Report, Step, total_io
from kvtier.scrape import Metrics
from lmcache_nvme_backend.errors import ConfigError

ANSWER_TOKENS = 32
QUOTA_GIB = 2
# Below this a restart could not show its share: the tail under one chunk would be most of the prompt.
_MIN_PROMPT_TOKENS = 2 * CHUNK_TOKENS + 1
_MAX_MODEL_LEN = 8192
# About 5,000 tokens in the tokenizer of each model.
_ENTRIES = 44
_ENTRIES_RANDOM = 32
# The first request of an engine pays for lazy set-up that has nothing to do with KV. It is shorter than a chunk, so
# that nothing of it is stored, and is sent after every start, so that the starts compare.
_WARM_UP = "Good morning, and a calm sea to you."


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a person may choose; the defaults are SmolLM2, the lighthouse log and a folder that is removed again."""

    model: str | None = None
    prompt: Path | None = None
    nvme: Path | None = None
    keep: bool = False
    port: int = 0


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> Report:
    """Run the three steps; `say` gets a line for each thing that takes long.

    Raises:
        ConfigError: an option that cannot work.
        EngineStartError, EngineRequestError: vLLM ended, or refused the prompt.
    """
    prompt = _prompt(options)
    model = find_model(options.model, say)
    with _nvme_folder(options, say) as nvme, _work_folder(say) as work:
        config = work / "lmcache.yaml"
        config.write_text(yaml.safe_dump(lmcache_config(nvme, QUOTA_GIB)))
        steps: list[Step] = []

        say("starting vLLM on the CPU (some 40 s) …")
        with Engine(_spec(options, model, config, work / "first.log")) as engine:
            tokens = engine.count_tokens(prompt)
            if tokens < _MIN_PROMPT_TOKENS:
                raise ConfigError(
                    "--prompt", f"{tokens} tokens", f"{_MIN_PROMPT_TOKENS} or more",
                    f"KV is kept in chunks of {CHUNK_TOKENS} tokens: give it a longer text.",
                )  # fmt: skip
            engine.complete(_WARM_UP, 4)
            say(f"cold: {tokens} tokens, nothing known yet …")
            steps.append(_ask(engine, "cold", prompt))
            say("repeat: the KV pool still holds them …")
            steps.append(_ask(engine, "repeat", prompt))
            before = engine.metrics()
            say("stopping the engine …")

        say("starting it again: its memory is empty, its folder is not …")
        with Engine(_spec(options, model, config, work / "second.log")) as engine:
            engine.complete(_WARM_UP, 4)
            say("restart: the same prompt …")
            steps.append(_ask(engine, "restart", prompt))
            after = engine.metrics()
            say("stopping the engine …")

        io = total_io(steps)
        return Report(
            steps=steps,
            lmcache_cpu_pool_bytes=_tier_bytes(after, "kvtier_lmcache_cpu_pool_bytes"),
            staging_bytes=_tier_bytes(after, "kvtier_staging_bytes"),
            nvme_bytes_written=io.write_bytes,
            nvme_bytes_read=io.read_bytes,
            chunks_dropped=int(sum(m.value("kvtier_chunks_dropped_total") for m in (before, after))),
            chunks_corrupt=int(sum(m.value("kvtier_chunks_corrupt_total") for m in (before, after))),
        )


def lmcache_config(nvme: Path, quota_gib: float) -> dict[str, Any]:
    """The example's LMCache configuration with this folder and this quota in place of its own."""
    config: dict[str, Any] = yaml.safe_load(example("lmcache-nvme.yaml").read_text())
    config["extra_config"] |= {"nvme.path": str(nvme), "nvme.quota_gib": quota_gib}
    return config


def _spec(options: DemoOptions, model: Path, config: Path, log: Path) -> EngineSpec:
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings", _MAX_MODEL_LEN)
    return EngineSpec(
        model=model, log=log, lmcache_config=config, port=options.port, max_model_len=min(longest, _MAX_MODEL_LEN)
    )


def _prompt(options: DemoOptions) -> str:
    if options.prompt is None:
        return lighthouse_log(_ENTRIES_RANDOM if options.model == "random" else _ENTRIES) + QUESTION
    try:
        return options.prompt.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompt", str(error), "a text file in UTF-8", "Name another one.") from None


@contextmanager
def _nvme_folder(options: DemoOptions, say: Callable[[str], None]) -> Iterator[Path]:
    """The tier's folder: the person's, or a new one beside the cache directory, which is on a disk and not in RAM."""
    if options.nvme is not None:
        options.nvme.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield options.nvme.absolute()
        return
    require_space(cache_dir(), QUOTA_GIB << 30, "the demo's chunks")
    folder = Path(tempfile.mkdtemp(prefix="demo-nvme-", dir=cache_dir()))
    try:
        yield folder
    finally:
        if options.keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _work_folder(say: Callable[[str], None]) -> Iterator[Path]:
    """Where the configuration and the engines' logs lie; kept where the run failed."""
    folder = Path(tempfile.mkdtemp(prefix="demo-log-", dir=cache_dir()))
    try:
        yield folder
    except Exception:
        say(f"the engines' logs are kept in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def _ask(engine: Engine, name: Literal["cold", "repeat", "restart"], prompt: str) -> Step:
    """Ask once; the differences of vLLM's and the kernel's counters around it are the step's."""
    tokens_before, io_before = _prompt_tokens(engine.metrics()), engine.settled_io()
    answer = engine.complete(prompt, ANSWER_TOKENS)
    io: IoCounters = engine.settled_io() - io_before
    tokens = {source: count - tokens_before[source] for source, count in _prompt_tokens(engine.metrics()).items()}
    if sum(tokens.values()) != answer.prompt_tokens:
        raise EngineRequestError(
            f"vLLM's metrics count {tokens} prompt tokens for a prompt of {answer.prompt_tokens}: is anybody else "
            "sending requests to this engine?"
        )
    return Step(
        name=name,
        ttft_s=answer.ttft_s,
        prompt_tokens=answer.prompt_tokens,
        tokens_computed=tokens["local_compute"],
        tokens_from_pool=tokens["local_cache_hit"],
        tokens_from_nvme=tokens["external_kv_transfer"],
        bytes_read=io.read_bytes,
        bytes_written=io.write_bytes,
        text=answer.text,
    )


def _prompt_tokens(metrics: Metrics) -> dict[str, int]:
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: int(metrics.value("vllm:prompt_tokens_by_source_total", source=source)) for source in sources}


def _tier_bytes(metrics: Metrics, gauge: str) -> int:
    value = metrics.get(gauge)
    if value is None:
        raise EngineRequestError(
            f"the engine's /metrics has no {gauge}: the tier is not running in it; its log says why."
        )
    return int(value)
