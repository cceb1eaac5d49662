"""Ask a question about a document, ask again, restart the engine, ask again: what did each cost?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from kvtier.cachedir import cache_dir, own_folder, require_space
from kvtier.demo_doors import QUOTA_GIB, Side, door
from kvtier.document import QUESTION, lighthouse_log
from kvtier.doors import CHUNK_TOKENS, Door
from kvtier.engine import Engine, EngineRequestError, EngineSpec
from kvtier.model import RANDOM_MODELS, find_model
from kvtier.process import IoCounters
from kvtier.report import Report, Step, total_io
from kvtier.scrape import Metrics
from lmcache_nvme_backend.errors import ConfigError

ANSWER_TOKENS = 32
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
    door: Door = "plugin"


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> Report:
    """Run the three steps; `say` gets a line for each thing that takes long.

    Raises:
        ConfigError: an option that cannot work.
        EngineStartError, EngineRequestError: vLLM ended, or refused the prompt.
    """
    prompt = _prompt(options)
    model = find_model(options.model, say)
    lives = door(options.door, model)
    with _nvme_folder(options, say) as nvme, _work_folder(say) as work:
        steps: list[Step] = []

        say("starting vLLM on the CPU (some 40 s) …")
        with lives(nvme, work) as side, Engine(_spec(options, model, side, work / "first.log")) as engine:
            tokens = engine.count_tokens(prompt)
            if tokens < _MIN_PROMPT_TOKENS:
                raise ConfigError(
                    "--prompt", f"{tokens} tokens", f"{_MIN_PROMPT_TOKENS} or more",
                    f"KV is kept in chunks of {CHUNK_TOKENS} tokens: give it a longer text.",
                )  # fmt: skip
            engine.complete(_WARM_UP, 4)
            say(f"cold: {tokens} tokens, nothing known yet …")
            steps.append(_ask(engine, side, "cold", prompt))
            say("repeat: the KV pool still holds them …")
            steps.append(_ask(engine, side, "repeat", prompt))
            before = side.tier_metrics(engine)
            say("stopping the engine …")

        say("starting it again: its memory is empty, its folder is not …")
        with lives(nvme, work) as side, Engine(_spec(options, model, side, work / "second.log")) as engine:
            engine.complete(_WARM_UP, 4)
            say("restart: the same prompt …")
            steps.append(_ask(engine, side, "restart", prompt))
            after = side.tier_metrics(engine)
            say("stopping the engine …")

        io = total_io(steps)
        return Report(
            steps=steps,
            door=options.door,
            lmcache_cpu_pool_bytes=side.host_pool_bytes(after),
            staging_bytes=_staging_bytes(after),
            nvme_bytes_written=io.write_bytes,
            nvme_bytes_read=io.read_bytes,
            chunks_dropped=int(sum(m.value("kvtier_chunks_dropped_total") for m in (before, after))),
            chunks_corrupt=int(sum(m.value("kvtier_chunks_corrupt_total") for m in (before, after))),
        )


def _spec(options: DemoOptions, model: Path, side: Side, log: Path) -> EngineSpec:
    longest = json.loads((model / "config.json").read_text()).get("max_position_embeddings", _MAX_MODEL_LEN)
    return EngineSpec(
        model=model,
        log=log,
        lmcache_config=side.lmcache_config,
        port=options.port,
        max_model_len=min(longest, _MAX_MODEL_LEN),
        # In bfloat16 a random model's best two tokens are now and then one unit of the last place apart, so that the
        # order of a sum decides between them. (vLLM's gated delta nets on a CPU take nothing else.)
        args=(*side.args, *(("--dtype", "float32") if options.model == "random" else ())),
    )


def _prompt(options: DemoOptions) -> str:
    if options.prompt is None:
        return lighthouse_log(_ENTRIES_RANDOM if options.model in RANDOM_MODELS else _ENTRIES) + QUESTION
    try:
        return options.prompt.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompt", str(error), "a text file in UTF-8", "Name another one.") from None


@contextmanager
def _nvme_folder(options: DemoOptions, say: Callable[[str], None]) -> Iterator[Path]:
    """The tier's folder: the person's, or a new one in the cache directory, which is on a disk and not in RAM."""
    if options.nvme is not None:
        options.nvme.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield options.nvme.absolute()
        return
    require_space(cache_dir(), QUOTA_GIB << 30, "the demo's chunks")
    folder = own_folder("demo-nvme")
    try:
        yield folder
    finally:
        if options.keep:
            kept = folder.rename(folder.with_name(f"kept-{folder.name}"))
            say(f"the chunks are kept in {kept}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _work_folder(say: Callable[[str], None]) -> Iterator[Path]:
    """Where the configuration and the engines' logs lie; after a failure they stay until the next demo."""
    folder = own_folder("demo-log")
    try:
        yield folder
    except Exception:
        say(f"the engines' logs are kept in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def _ask(engine: Engine, side: Side, name: Literal["cold", "repeat", "restart"], prompt: str) -> Step:
    """Ask once; the differences of vLLM's and the kernel's counters around it are the step's."""
    tokens_before, io_before = _prompt_tokens(engine.metrics()), engine.settled_io() + side.tier_io()
    answer = engine.complete(prompt, ANSWER_TOKENS)
    io: IoCounters = engine.settled_io() + side.tier_io() - io_before
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


def _staging_bytes(metrics: Metrics) -> int:
    """0 through a door whose host memory is LMCache's or vLLM's own."""
    if metrics.get("kvtier_quota_bytes") is None:
        raise EngineRequestError("no /metrics has kvtier_quota_bytes: the tier is not running; the log says why.")
    return int(metrics.value("kvtier_staging_bytes"))
