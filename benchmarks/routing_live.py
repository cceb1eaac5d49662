"""Sends one stretch of a trace through real routers in front of the same model servers and prints one table.

    python benchmarks/routing_live.py --trace FILE [--requests 300] [--replicas 4] [--json FILE]

Rows: the LiteLLM proxy with the hook, the LiteLLM proxy alone, and, where they are installed, `sglang-router` and
`vllm-router` (their interpreters by `--sglang-python` and `--vllm-router`). The servers are the tests' model servers:
a bounded block-level prefix cache, prefill in proportion to what is not cached, one prompt at a time. Each row starts
with empty caches; every request is the trace's own block structure as chat messages, streamed, at the trace's pace
sped up; time to first token is the client's. The last line compares the proxy with and without the hook on requests of
100 KB, alternating, in front of servers that take no time: the latency that the hook adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from routing import Request, load_trace, quantile  # noqa: E402

KEY = "sk-Bench-0123456789abcdefABCDEF-ghijkl"
BLOCK_CHARS = 128
"""Characters that stand for one 512-token block of the trace: two blocks of the model servers."""
CACHE_BLOCKS = 6_000
PREFILL_RATE = 3_000.0
"""Tokens a second of the model servers, four characters a token."""


class LiveRow(msgspec.Struct):
    router: str
    hit_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float
    failed: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def child(command: list[str], log: Path, ready: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """The pid of a process in its own group, once `ready` answers 200; ended with all it started."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True, cwd=log.parent)
    try:
        end = time.monotonic() + 120
        while not is_up(ready):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[:4]} did not start:\n{log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def model_server(folder: Path, name: str, *options: str) -> tuple[list[str], Path, str, int]:
    port = free_port()
    script = ROOT / "tests" / "proxy" / "model_server.py"
    command = [sys.executable, str(script), "--port", str(port), "--name", name, *options]
    return command, folder / f"{name}.log", f"http://127.0.0.1:{port}/health", port


def proxy(folder: Path, name: str, ports: list[int], hook: bool) -> tuple[list[str], Path, str, dict[str, str], int]:
    port = free_port()
    config: dict[str, Any] = {
        "model_list": [
            {
                "model_name": "tiny",
                "litellm_params": {
                    "model": "hosted_vllm/tiny",
                    "api_base": f"http://127.0.0.1:{at}/v1",
                    "api_key": "none",
                },
                "model_info": {"id": f"replica-{at}"},
            }
            for at in ports
        ],
        "litellm_settings": {"callbacks": ["litellm_hooks.prefix_affinity.instance"]} if hook else {},
        "general_settings": {"master_key": KEY},
        "router_settings": {"num_retries": 2},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(ROOT)}
    code = "from litellm.proxy.proxy_cli import run_server; run_server()"
    command = [sys.executable, "-c", code, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    return command, folder / f"{name}.log", f"http://127.0.0.1:{port}/health/liveliness", env, port


def messages_of(request: Request) -> list[dict[str, str]]:
    """The request's blocks as messages: the shared one is the system prompt, the last is a user's."""
    texts = [(f"block {block} " * BLOCK_CHARS)[:BLOCK_CHARS] for block in request.hash_ids]
    turns = [{"role": "system", "content": texts[0]}]
    turns += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts[1:])]
    if len(turns) % 2 == 1:
        turns.append({"role": "user", "content": "go on"})
    return turns


async def drive(url: str, requests: list[Request], span_s: float) -> tuple[list[float], int]:
    """Times to first token in seconds, and how many requests failed."""
    first, last = requests[0].timestamp, requests[-1].timestamp
    pace = span_s / max(last - first, 1.0)
    times: list[float] = []
    failed = 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=120, limits=limits, headers={"Authorization": f"Bearer {KEY}"}) as client:

        async def one(request: Request) -> None:
            nonlocal failed
            await asyncio.sleep((request.timestamp - first) * pace)
            body = {"model": "tiny", "messages": messages_of(request), "stream": True, "max_tokens": 4}
            began = time.monotonic()
            try:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                    if answer.status_code != 200:
                        failed += 1
                        return
                    async for _ in answer.aiter_bytes():
                        times.append(time.monotonic() - began)
                        break
                    async for _ in answer.aiter_bytes():
                        pass
            except (httpx.HTTPError, httpx.StreamError):
                pass

        await asyncio.gather(*(one(request) for request in requests))
    failed += max(0, len(requests) - len(times) - failed)
    return times, failed


def measure(name: str, url: str, ports: list[int], requests: list[Request], span_s: float) -> LiveRow:
    for port in ports:
        httpx.post(f"http://127.0.0.1:{port}/_wipe")
    times, failed = asyncio.run(drive(url, requests, span_s))
    answers = [httpx.get(f"http://127.0.0.1:{port}/_state").json()["answers"] for port in ports]
    work = [sum(a["prompt_tokens"] - a["cached_tokens"] for a in served) for served in answers]
    every = [answer for served in answers for answer in served]
    return LiveRow(
        router=name,
        hit_ratio=sum(a["cached_tokens"] for a in every) / max(1, sum(a["prompt_tokens"] for a in every)),
        ttft_p50_s=quantile(times, 0.5) if times else float("nan"),
        ttft_p99_s=quantile(times, 0.99) if times else float("nan"),
        imbalance=max(work) / max(1e-9, statistics.mean(work)),
        failed=failed,
    )


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, user and system (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def added_latency(folder: Path, replicas: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a 100 KB request through the proxy without and with the hook: medians at the client, the median
    of their differences, and processor time, which a busy machine does not stretch."""
    with ExitStack() as stack:
        ports = []
        for number in range(replicas):
            *server, port = model_server(folder, f"instant{number}")
            stack.enter_context(child(*server))
            ports.append(port)
        urls, pids = [], []
        for name, hook in (("plain", False), ("hooked", True)):
            *start, at = proxy(folder, f"added-{name}", ports, hook)
            pids.append(stack.enter_context(child(*start)))
            urls.append(f"http://127.0.0.1:{at}/v1/chat/completions")
        client = stack.enter_context(httpx.Client(timeout=60, headers={"Authorization": f"Bearer {KEY}"}))
        text = "words of a history " * 88
        history = [{"role": ("user", "assistant")[i % 2], "content": f"{i} {text}"} for i in range(61)]
        samples: list[list[float]] = [[], []]
        used = [0.0, 0.0]
        for number in range(rounds + 10):
            if number == 10:
                used = [cpu_seconds(pid) for pid in pids]
            messages = [*history, {"role": "user", "content": f"turn {number}"}]
            for which in ((0, 1), (1, 0))[number % 2]:
                began = time.perf_counter()
                answer = client.post(urls[which], json={"model": "tiny", "max_tokens": 1, "messages": messages})
                answer.raise_for_status()
                samples[which].append(time.perf_counter() - began)
        used = [cpu_seconds(pid) - before for pid, before in zip(pids, used)]
        plain, hooked = (kind[10:] for kind in samples)
        return {
            "plain_ms": 1e3 * statistics.median(plain),
            "hooked_ms": 1e3 * statistics.median(hooked),
            "added_ms": 1e3 * statistics.median(b - a for a, b in zip(plain, hooked)),
            "plain_cpu_ms": 1e3 * used[0] / rounds,
            "hooked_cpu_ms": 1e3 * used[1] / rounds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=150, help="requests of the last line, each way")
    parser.add_argument("--span", type=float, default=45.0, help="seconds the requests are spread over")
    parser.add_argument("--sglang-python", default=sys.executable, help="an interpreter with sglang-router")
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router") or "vllm-router")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    requests = [r for r in load_trace(options.trace) if len(r.hash_ids) <= 60][: options.requests]
    rows: list[LiveRow] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ports = []
        for number in range(options.replicas):
            *server, port = model_server(
                folder, f"replica{number}", "--blocks", str(CACHE_BLOCKS), "--prefill-rate", str(PREFILL_RATE)
            )
            stack.enter_context(child(*server))
            ports.append(port)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for label, hook in (("litellm + prefix_affinity", True), ("litellm (shuffle)", False)):
            *start, at = proxy(folder, label.split()[-1].strip("()"), ports, hook)
            with child(*start):
                rows.append(measure(label, f"http://127.0.0.1:{at}", ports, requests, options.span))
        peers: list[tuple[str, list[str]]] = [
            ("sglang-router cache_aware",
             [options.sglang_python, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]),
            ("vllm-router cache_aware", [options.vllm_router, "--policy", "cache_aware"]),
            ("vllm-router consistent_hash", [options.vllm_router, "--policy", "consistent_hash"]),
            ("vllm-router power_of_two", [options.vllm_router, "--policy", "power_of_two"]),
        ]  # fmt: skip
        for label, command in peers:
            at = free_port()
            whole = [*command, "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(at),
                     "--prometheus-port", str(free_port())]  # fmt: skip
            try:
                with child(whole, folder / f"{label.replace(' ', '-')}.log", f"http://127.0.0.1:{at}/health"):
                    rows.append(measure(label, f"http://127.0.0.1:{at}", ports, requests, options.span))
            except (RuntimeError, FileNotFoundError) as error:
                print(f"{label}: not measured: {str(error).splitlines()[-1]}")
        added = added_latency(folder, options.replicas, options.rounds)
    print(f"{len(requests)} requests in {options.span:.0f} s, {options.replicas} replicas")
    print(f"{'router':<28} {'hit ratio':>9} {'ttft p50':>9} {'ttft p99':>9} {'imbalance':>9} {'failed':>6}")
    for row in rows:
        print(
            f"{row.router:<28} {row.hit_ratio:>9.2%} {row.ttft_p50_s:>8.3f}s {row.ttft_p99_s:>8.2f}s "
            f"{row.imbalance:>9.3f} {row.failed:>6}"
        )
    print(
        f"100 KB request: {added['plain_ms']:.2f} ms without, {added['hooked_ms']:.2f} ms with the hook, added "
        f"{added['added_ms']:.2f} ms; processor time {added['plain_cpu_ms']:.2f} and {added['hooked_cpu_ms']:.2f} ms"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": msgspec.to_builtins(rows), "added": added}, indent=1))


if __name__ == "__main__":
    main()
