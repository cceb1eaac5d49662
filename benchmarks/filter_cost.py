"""What the hook's decision costs the proxy's event loop, for long histories of few or many messages.

    python benchmarks/filter_cost.py [--turns 40] [--replicas 4] [--json FILE]

The hook is called as LiteLLM's router calls it, in this process. Each row is a session that grows by two messages a
turn; every turn's body is parsed from JSON anew, as a proxy gets it, so that no string is the object of the last turn.
*Next turn* is the median of the turns after the first, *first turn* the median over sessions nobody has seen; the
peer is `json.loads` of the same body, which every proxy pays before it can decide anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import machine  # noqa: E402
from rows import Row, write_json  # noqa: E402

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched

from litellm_hooks.hook import PrefixAffinity  # noqa: E402
from litellm_hooks.settings import Settings  # noqa: E402

# (bytes of text, messages, characters outside Latin-1, tool calls), and the milliseconds to stay within.
SHAPES = [
    (100_000, 60, False, False, 0.3),
    (100_000, 60, False, True, 0.3),
    (1_000_000, 60, False, False, 2.0),
    (1_000_000, 600, False, False, 2.0),
    (1_000_000, 3_000, False, False, 2.0),
    (1_000_000, 3_000, False, True, 2.0),
    (1_000_000, 600, True, False, 2.0),
]
FIRST_TURNS = 15


def message(session: int, number: int, chars: int, wide: bool, tools: bool) -> dict[str, Any]:
    words = "слова разговора " if wide else "words of a history "
    text = f"{session} {number} " + (words * (chars // len(words) + 1))[:chars]
    if tools and number % 2:
        call = {"id": f"call-{number}", "type": "function", "function": {"name": "read", "arguments": json.dumps(text)}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if tools and number:
        return {"role": "tool", "tool_call_id": f"call-{number - 1}", "content": text}
    return {"role": ("user", "assistant")[number % 2], "content": text}


def body(session: int, turn: int, shape: tuple[int, int, bool, bool, float]) -> str:
    nbytes, count, wide, tools, _ = shape
    chars = nbytes // count // (2 if wide else 1)
    messages = [message(session, number, chars, wide, tools) for number in range(count + 2 * turn)]
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=False)


def pool(replicas: int) -> list[dict[str, Any]]:
    return [
        {
            "model_name": "m",
            "litellm_params": {"model": "hosted_vllm/x", "api_base": f"http://replica-{i}/v1"},
            "model_info": {"id": f"replica-{i}"},
        }
        for i in range(replicas)
    ]


class Caller:
    def __init__(self, hook: PrefixAffinity, deployments: list[dict[str, Any]]) -> None:
        self.hook, self.deployments, self.calls = hook, deployments, 0

    async def decide(self, text: str) -> tuple[float, float]:
        """Milliseconds of the decision and of parsing the body."""
        began = time.perf_counter()
        request = json.loads(text)
        parsed = time.perf_counter()
        self.calls += 1
        about = {"litellm_call_id": f"call-{self.calls}", "metadata": {}}
        asked = time.perf_counter()
        found = await self.hook.async_filter_deployments("m", self.deployments, request["messages"], about)
        done = time.perf_counter()
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} deployments were chosen")
        return (done - asked) * 1e3, (parsed - began) * 1e3


async def measure(shape: tuple[int, int, bool, bool, float], turns: int, replicas: int) -> tuple[float, float, float]:
    hook = PrefixAffinity(Settings(share_by_redis=False))
    try:
        caller = Caller(hook, pool(replicas))
        first = [(await caller.decide(body(session, 0, shape)))[0] for session in range(FIRST_TURNS)]
        later = [await caller.decide(body(0, turn, shape)) for turn in range(1, turns + 1)]
    finally:
        await hook.close()
    return median(cost for cost, _ in later), median(first), median(parsing for _, parsing in later)


def main(
    turns: Annotated[int, typer.Option(min=3)] = 40,
    replicas: Annotated[int, typer.Option(min=2)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """How long the hook holds the proxy's event loop for one decision."""
    table = Table(title=f"the hook's decision, {replicas} replicas, medians")
    for column in ("history", "next turn, ms", "to reach", "first turn, ms", "json.loads, ms"):
        table.add_column(column, justify="left" if column == "history" else "right")
    rows: list[Row] = []
    for shape in SHAPES:
        nbytes, count, wide, tools, goal = shape
        following, first, parsing = asyncio.run(measure(shape, turns, replicas))
        name = f"{nbytes // 1000} KB in {count} messages" + ", Cyrillic" * wide + ", tool calls" * tools
        table.add_row(name, f"{following:.3f}", f"{goal}", f"{first:.3f}", f"{parsing:.3f}")
        for operation, value in (("next turn", following), ("first turn", first)):
            ratio = value / parsing
            rows.append(Row("prefix_affinity", f"{operation}, {name}", nbytes, value, "ms", peer_ratio=ratio))
    Console().print(table)
    if json_file is not None:
        write_json(json_file, rows, machine(Path.home()))


if __name__ == "__main__":
    typer.run(main)
