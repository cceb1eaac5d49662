"""What LMCache's `save_decode_cache` brings to a multi-turn session, where every answer is part of the next prompt.

Two engines, one after the other, on the same session: answers stored, and not. vLLM's own pool is emptied before each
turn, so that each turn is served from the tier as after an eviction or a restart. Prints a table; `--json FILE`
writes its rows. The answers are cut to `--answer-tokens`: what matters is how they compare to a chunk of 256 tokens.

    python benchmarks/decode_cache.py --answer-tokens 400 --turns 6
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import httpx
import typer
import yaml
from rich.console import Console
from rich.table import Table

from kvtier.engine import Engine, EngineSpec
from kvtier.examples import example
from kvtier.model import find_model

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def tokens(engine: Engine) -> dict[str, float]:
    metrics = engine.metrics()
    return {source: metrics.value("vllm:prompt_tokens_by_source_total", source=source) for source in SOURCES}


def answer_to(engine: Engine, history: list[int], length: int) -> list[int]:
    """The answer as token ids: text would be cut into other tokens when it comes back as a prompt."""
    body = {"model": engine.spec.served_name, "prompt": history, "max_tokens": length, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=600).raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


def run_session(saved: bool, turns: int, answer_tokens: int, user_tokens: int) -> dict[str, float | str]:
    """One engine, one session; the sums over its turns."""
    with tempfile.TemporaryDirectory(prefix="decode-cache-", dir=Path.home()) as folder:
        config = yaml.safe_load(example("lmcache-nvme.yaml").read_text())
        config["extra_config"] |= {"nvme.path": f"{folder}/kv", "nvme.quota_gib": 4}
        config["save_decode_cache"] = saved
        (Path(folder) / "kv").mkdir()
        (Path(folder) / "lmcache.yaml").write_text(yaml.safe_dump(config))
        spec = EngineSpec(
            model=find_model("random", lambda _: None),
            log=Path(folder) / "engine.log",
            lmcache_config=Path(folder) / "lmcache.yaml",
            env={"VLLM_SERVER_DEV_MODE": "1"},
        )
        with Engine(spec) as engine:
            history: list[int] = []
            prompt_tokens = 0
            for turn in range(turns):
                httpx.post(f"{engine.url}/reset_prefix_cache", timeout=30).raise_for_status()
                history += [20 + (7919 * turn + 31 * i) % 220 for i in range(user_tokens)]
                prompt_tokens += len(history)
                history += answer_to(engine, history, answer_tokens)
                engine.settled_io()
            found = tokens(engine)
            written = engine.metrics().value("kvtier_bytes_written_total")
    return {
        "answers": "stored" if saved else "not stored",
        "prompt_tokens": prompt_tokens,
        "computed": found["local_compute"],
        "from_tier": found["external_kv_transfer"],
        "written_mib": written / 2**20,
    }


def main(
    turns: Annotated[int, typer.Option(min=2)] = 6,
    answer_tokens: Annotated[int, typer.Option(min=1)] = 400,
    user_tokens: Annotated[int, typer.Option(min=1)] = 600,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    rows = [run_session(saved, turns, answer_tokens, user_tokens) for saved in (False, True)]
    title = (
        f"{turns} turns, {user_tokens} new tokens and an answer of {answer_tokens} each, every turn after an empty pool"
    )
    table = Table(title=title)
    for column in ("answers", "prompt tokens", "computed", "from the tier", "written MiB"):
        table.add_column(column, justify="left" if column == "answers" else "right")
    for row in rows:
        table.add_row(
            str(row["answers"]), f"{row['prompt_tokens']:,.0f}", f"{row['computed']:,.0f}", f"{row['from_tier']:,.0f}",
            f"{row['written_mib']:.1f}",
        )  # fmt: skip
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
