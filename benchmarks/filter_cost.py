"""What the hook's decision costs the proxy's event loop, for long histories of few or many messages.

    python benchmarks/filter_cost.py [--turns 40] [--replicas 4] [--json FILE]

The hook is called as LiteLLM's router calls it, in this process. Each row is a session that grows by two messages a
turn; every turn's body is parsed from JSON anew, as a proxy gets it, so that no string is the object of the last turn.
*Next turn* is the median of the turns after the first, *first turn* the median over sessions nobody has seen, as all
are after a restart; *leaving* is what the hook does when such a turn's call goes out, which remembers where. The peer
is `json.loads` of the same body, which every proxy pays before it can decide anything.
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

TEXT, WIDE, TOOLS, BLOCKS = "", "Cyrillic", "tool calls", "blocks"
"""What the messages are: text, text outside Latin-1, tool calls in OpenAI's form and in Anthropic's."""

# (bytes of text, messages, kind), and the milliseconds that a next turn is to stay within.
Shape = tuple[int, int, str, float]
SHAPES: list[Shape] = [
    (100_000, 60, TEXT, 0.3),
    (100_000, 60, TOOLS, 0.3),
    (100_000, 60, BLOCKS, 0.3),
    (1_000_000, 60, TEXT, 2.0),
    (1_000_000, 600, TEXT, 2.0),
    (1_000_000, 3_000, TEXT, 2.0),
    (1_000_000, 3_000, TOOLS, 2.0),
    (1_000_000, 3_000, BLOCKS, 2.0),
    (1_000_000, 600, WIDE, 2.0),
]
FIRST_TURNS = 15


def message(session: int, number: int, chars: int, kind: str) -> dict[str, Any]:
    words = "слова разговора " if kind == WIDE else "words of a history "
    text = f"{session} {number} " + (words * (chars // len(words) + 1))[:chars]
    if kind == BLOCKS and number % 2:
        use = {"type": "tool_use", "id": f"call-{number}", "name": "read", "input": {"text": text}}
        return {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, use]}
    if kind == BLOCKS and number:
        read = [{"type": "text", "text": text}]
        result = {"type": "tool_result", "tool_use_id": f"call-{number - 1}", "content": read}
        return {"role": "user", "content": [result]}
    if kind == TOOLS and number % 2:
        call = {"id": f"call-{number}", "type": "function", "function": {"name": "read", "arguments": json.dumps(text)}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == TOOLS and number:
        return {"role": "tool", "tool_call_id": f"call-{number - 1}", "content": text}
    return {"role": ("user", "assistant")[number % 2], "content": text}


def body(session: int, turn: int, shape: Shape) -> str:
    nbytes, count, kind, _ = shape
    chars = nbytes // count // (2 if kind == WIDE else 1)
    messages = [message(session, number, chars, kind) for number in range(count + 2 * turn)]
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

    async def decide(self, text: str) -> tuple[float, float, float]:
        """Milliseconds of the decision, of parsing the body, and of the call's leaving. The answer comes at once."""
        began = time.perf_counter()
        request = json.loads(text)
        parsed = time.perf_counter()
        self.calls += 1
        ident = {"litellm_call_id": f"call-{self.calls}"}
        about = {**ident, "metadata": {}}
        asked = time.perf_counter()
        found = await self.hook.async_filter_deployments("m", self.deployments, request["messages"], about)
        done = time.perf_counter()
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} deployments were chosen")
        left = {**ident, "model_info": found[0]["model_info"], **found[0]["litellm_params"]}
        leaving = time.perf_counter()
        await self.hook.async_pre_call_deployment_hook(left, "acompletion")
        gone = time.perf_counter()
        await self.hook.async_post_call_success_deployment_hook(left, {}, "acompletion")
        return (done - asked) * 1e3, (parsed - began) * 1e3, (gone - leaving) * 1e3


async def measure(shape: Shape, turns: int, replicas: int) -> dict[str, float]:
    """Medians in milliseconds, by operation."""
    hook = PrefixAffinity(Settings(share_by_redis=False))
    try:
        caller = Caller(hook, pool(replicas))
        first = [(await caller.decide(body(session, 0, shape)))[0] for session in range(FIRST_TURNS)]
        later = [await caller.decide(body(0, turn, shape)) for turn in range(1, turns + 1)]
    finally:
        await hook.close()
    deciding, parsing, leaving = (median(times) for times in zip(*later))
    return {"next turn": deciding, "first turn": median(first), "leaving": leaving, "json.loads": parsing}


def main(
    turns: Annotated[int, typer.Option(min=3)] = 40,
    replicas: Annotated[int, typer.Option(min=2)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """How long the hook holds the proxy's event loop for one decision."""
    table = Table(title=f"the hook's decision, {replicas} replicas, medians")
    for column in ("history", "next turn, ms", "to reach", "first turn, ms", "leaving, ms", "json.loads, ms"):
        table.add_column(column, justify="left" if column == "history" else "right")
    rows: list[Row] = []
    for shape in SHAPES:
        nbytes, count, kind, goal = shape
        found = asyncio.run(measure(shape, turns, replicas))
        name = f"{nbytes // 1000} KB in {count} messages" + (f", {kind}" if kind else "")
        cells = {operation: f"{value:.3f}" for operation, value in found.items()}
        table.add_row(name, cells["next turn"], f"{goal}", cells["first turn"], cells["leaving"], cells["json.loads"])
        parsing = found.pop("json.loads")
        for operation, value in found.items():
            ratio = value / parsing
            rows.append(Row("prefix_affinity", f"{operation}, {name}", nbytes, value, "ms", peer_ratio=ratio))
    Console().print(table)
    if json_file is not None:
        write_json(json_file, rows, machine(Path.home()))


if __name__ == "__main__":
    typer.run(main)
