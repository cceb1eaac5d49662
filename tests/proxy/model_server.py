"""A small OpenAI- and Anthropic-compatible server that models one vLLM replica's prefix cache.

It keeps a bounded LRU of *blocks* (64 characters of the rendered prompt, chained hashes, seeded by `cache_salt`, as
vLLM's own prefix cache), answers `cached_tokens` the way vLLM does with `--enable-prompt-tokens-details`, spends time
in proportion to the uncached part, and serves `/metrics` under vLLM's names. With `--tier FILE` the block keys outlive
the process, as an NVMe tier does. `GET /_requests` returns every body it was sent and `GET /_state` what runs now;
`POST /_fail?times=N` lets the next requests fail, `POST /_hold` none ever get its first token, `POST /_wipe` forgets
all, and `POST /_gauges?running=1&waiting=2&usage=0.5` puts these into `/metrics` (`?hang=1`: no answer; nothing: the
truth again).

    python model_server.py --port 8001 --name a
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK_CHARS = 64
CHARS_A_TOKEN = 4


def rendered_prompt(body: dict[str, Any]) -> str:
    """The prompt text in the order chat templates use: tools, system, then the messages."""
    parts = [json.dumps(body.get("tools")), str(body.get("reasoning_effort"))]
    for key in ("system", "instructions", "prompt"):
        if body.get(key):
            parts.append(f"<{key}>{json.dumps(body[key])}")
    turns = body.get("messages", body.get("input")) or []
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    for turn in turns:
        parts.append(json.dumps(turn, sort_keys=True))
    return "".join(parts)


class Replica:
    """One replica's cache, queue and counters."""

    def __init__(self, name: str, blocks: int, prefill_rate: float, decode_ms: float, tier: Path | None) -> None:
        self.name, self.blocks, self.prefill_rate, self.decode_ms, self.tier = (
            name,
            blocks,
            prefill_rate,
            decode_ms,
            tier,
        )
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.requests: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.running = self.waiting = 0
        self.engine = asyncio.Lock()
        self.failing = 0
        self.gauges: dict[str, str] = {}
        self.answering = asyncio.Event()  # cleared: prefill never ends
        self.answering.set()
        if tier is not None and tier.exists():
            self.cache.update((int(line, 16), None) for line in tier.read_text().split())

    def prefix(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """Chained block keys of the prompt and how many of them lead the cache; touches what it finds."""
        text = rendered_prompt(body)
        chain = xxhash.xxh3_64_intdigest(str(body.get("cache_salt") or "").encode() + str(body.get("model")).encode())
        keys = []
        for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
            chain = xxhash.xxh3_64_intdigest(text[start : start + BLOCK_CHARS].encode(), seed=chain)
            keys.append(chain)
        held = 0
        while held < len(keys) and keys[held] in self.cache:
            self.cache.move_to_end(keys[held])
            held += 1
        return keys, held

    async def prefill(self, path: str, body: dict[str, Any]) -> tuple[int, int]:
        """Runs the prompt through the engine; answers (prompt tokens, cached tokens)."""
        self.waiting += 1
        try:
            await self.engine.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            keys, held = self.prefix(body)
            tokens = max(1, len(rendered_prompt(body)) // CHARS_A_TOKEN)
            cached = held * BLOCK_CHARS // CHARS_A_TOKEN
            await self.answering.wait()
            if self.prefill_rate > 0:
                await asyncio.sleep((tokens - cached) / self.prefill_rate)
            for key in keys:
                self.cache[key] = None
                self.cache.move_to_end(key)
            while len(self.cache) > self.blocks:
                self.cache.popitem(last=False)
            if self.tier is not None:
                self.tier.write_text("\n".join(f"{key:x}" for key in self.cache))
            self.answers.append({"path": path, "prompt_tokens": tokens, "cached_tokens": cached})
            return tokens, cached
        finally:
            self.running -= 1
            self.engine.release()


def usage_of(tokens: int, cached: int, out: int) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens,
        "completion_tokens": out,
        "total_tokens": tokens + out,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def build(replica: Replica) -> Starlette:
    def words_for(body: dict[str, Any]) -> list[str]:
        count = min(int(body.get("max_tokens") or body.get("max_output_tokens") or 4), 400)
        return [f"w{i} " for i in range(count)]

    async def paced(words: list[str]) -> AsyncIterator[str]:
        replica.running += 1
        try:
            for word in words:
                if replica.decode_ms:
                    await asyncio.sleep(replica.decode_ms / 1000)
                yield word
        finally:
            replica.running -= 1

    def refusal() -> Response | None:
        if replica.failing > 0:
            replica.failing -= 1
            return JSONResponse({"error": {"message": "engine died", "type": "server_error"}}, status_code=500)
        return None

    async def accept(request: Request) -> dict[str, Any]:
        body = await request.json()
        replica.requests.append({"path": request.url.path, "body": body, "headers": dict(request.headers)})
        return body

    def sse(events: AsyncIterator[str]) -> StreamingResponse:
        return StreamingResponse(events, media_type="text/event-stream")

    async def chat(request: Request) -> Response:
        body = await accept(request)
        if (bad := refusal()) is not None:
            return bad
        words, model, created = words_for(body), body.get("model"), int(time.time())
        ident = f"chatcmpl-{replica.name}-{len(replica.requests)}"
        if not body.get("stream"):
            tokens, cached = await replica.prefill("chat", body)
            text = "".join([word async for word in paced(words)])
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            return JSONResponse(
                {
                    "id": ident, "object": "chat.completion", "created": created, "model": model,
                    "choices": [choice], "usage": usage_of(tokens, cached, len(words)),
                }
            )  # fmt: skip
        wants_usage = (body.get("stream_options") or {}).get("include_usage")

        def event(delta: dict[str, Any] | None, finish: str | None = None, usage: dict[str, Any] | None = None) -> str:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
            head = {"id": ident, "object": "chat.completion.chunk", "created": created, "model": model}
            return f"data: {json.dumps({**head, 'choices': choices, **({'usage': usage} if usage else {})})}\n\n"

        async def events() -> AsyncIterator[str]:
            tokens, cached = await replica.prefill("chat", body)
            yield event({"role": "assistant", "content": ""})
            async for word in paced(words):
                yield event({"content": word})
            yield event({}, "stop")
            if wants_usage:
                yield event(None, usage=usage_of(tokens, cached, len(words)))
            yield "data: [DONE]\n\n"

        return sse(events())

    async def completions(request: Request) -> Response:
        body = await accept(request)
        if (bad := refusal()) is not None:
            return bad
        words, created = words_for(body), int(time.time())
        head = {"id": f"cmpl-{len(replica.requests)}", "object": "text_completion", "created": created,
                "model": body.get("model")}  # fmt: skip
        if not body.get("stream"):
            tokens, cached = await replica.prefill("completions", body)
            choice = {"index": 0, "text": "".join(words), "finish_reason": "stop", "logprobs": None}
            return JSONResponse({**head, "choices": [choice], "usage": usage_of(tokens, cached, len(words))})

        async def events() -> AsyncIterator[str]:
            tokens, cached = await replica.prefill("completions", body)
            async for word in paced(words):
                choice = {"index": 0, "text": word, "finish_reason": None}
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
            done = {**head, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
            yield f"data: {json.dumps(done)}\n\n"
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(tokens, cached, len(words))})}\n\n"
            yield "data: [DONE]\n\n"

        return sse(events())

    async def responses(request: Request) -> Response:
        body = await accept(request)
        if (bad := refusal()) is not None:
            return bad
        words = words_for(body)
        ident = f"resp_{replica.name}_{len(replica.requests)}"

        def answer(status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
            content = [{"type": "output_text", "text": "".join(words), "annotations": []}]
            message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": content}
            return {
                "id": ident, "object": "response", "created_at": int(time.time()), "status": status,
                "model": body.get("model"), "output": [message] if status == "completed" else [], "usage": usage,
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0,
                "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            }  # fmt: skip

        def usage(tokens: int, cached: int) -> dict[str, Any]:
            return {
                "input_tokens": tokens, "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": len(words), "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens + len(words),
            }  # fmt: skip

        if not body.get("stream"):
            tokens, cached = await replica.prefill("responses", body)
            return JSONResponse(answer("completed", usage(tokens, cached)))

        async def events() -> AsyncIterator[str]:
            def event(kind: str, number: int, **fields: Any) -> str:
                return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n"

            yield event("response.created", 0, response=answer("in_progress", None))
            tokens, cached = await replica.prefill("responses", body)
            number = 1
            async for word in paced(words):
                yield event("response.output_text.delta", number, item_id="msg_1", output_index=0, content_index=0,
                            delta=word, logprobs=[])  # fmt: skip
                number += 1
            yield event("response.completed", number, response=answer("completed", usage(tokens, cached)))

        return sse(events())

    async def messages(request: Request) -> Response:
        body = await accept(request)
        if (bad := refusal()) is not None:
            return bad
        words = words_for(body)
        head = {"id": f"msg_{len(replica.requests)}", "type": "message", "role": "assistant", "model": body["model"],
                "stop_sequence": None}  # fmt: skip

        def usage(tokens: int, cached: int) -> dict[str, int]:
            return {"input_tokens": tokens - cached, "cache_read_input_tokens": cached,
                    "cache_creation_input_tokens": 0, "output_tokens": len(words)}  # fmt: skip

        if not body.get("stream"):
            tokens, cached = await replica.prefill("messages", body)
            content = [{"type": "text", "text": "".join(words)}]
            return JSONResponse({**head, "content": content, "stop_reason": "end_turn", "usage": usage(tokens, cached)})

        async def events() -> AsyncIterator[str]:
            def event(kind: str, **fields: Any) -> str:
                return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

            tokens, cached = await replica.prefill("messages", body)
            start = {**head, "content": [], "stop_reason": None, "usage": usage(tokens, cached)}
            yield event("message_start", message=start)
            yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            async for word in paced(words):
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
            yield event("content_block_stop", index=0)
            yield event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None},
                        usage={"output_tokens": len(words)})  # fmt: skip
            yield event("message_stop")

        return sse(events())

    async def count_tokens(request: Request) -> Response:
        body = await accept(request)
        return JSONResponse({"input_tokens": max(1, len(rendered_prompt(body)) // CHARS_A_TOKEN)})

    async def metrics(_request: Request) -> Response:
        labels = f'{{engine="0",model_name="{replica.name}"}}'
        told = replica.gauges
        if "hang" in told:
            await asyncio.sleep(3600)
        return PlainTextResponse(
            f"vllm:num_requests_running{labels} {told.get('running', float(replica.running))}\n"
            f"vllm:num_requests_waiting{labels} {told.get('waiting', float(replica.waiting))}\n"
            f"vllm:kv_cache_usage_perc{labels} {told.get('usage', len(replica.cache) / replica.blocks)}\n"
            f"process_start_time_seconds {STARTED}\n"
        )

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok")

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def server_info(_request: Request) -> Response:
        return JSONResponse({"model_path": "tiny", "is_generation": True, "max_num_reqs": 64})

    async def seen(_request: Request) -> Response:
        return JSONResponse(replica.requests)

    async def state(_request: Request) -> Response:
        return JSONResponse(
            {"name": replica.name, "running": replica.running, "waiting": replica.waiting,
             "served": len(replica.answers), "answers": replica.answers}
        )  # fmt: skip

    async def fail(request: Request) -> Response:
        replica.failing = int(request.query_params.get("times", "1"))
        return PlainTextResponse("ok")

    async def hold(_request: Request) -> Response:
        replica.answering.clear()
        return PlainTextResponse("ok")

    async def gauges(request: Request) -> Response:
        replica.gauges = dict(request.query_params)
        return PlainTextResponse("ok")

    async def wipe(_request: Request) -> Response:
        replica.cache.clear()
        replica.answers.clear()
        replica.requests.clear()
        return PlainTextResponse("ok")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/models", models),
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/get_server_info", server_info),
            Route("/get_model_info", server_info),
            Route("/server_info", server_info),
            Route("/model_info", server_info),
            Route("/_requests", seen),
            Route("/_state", state),
            Route("/_fail", fail, methods=["POST"]),
            Route("/_hold", hold, methods=["POST"]),
            Route("/_gauges", gauges, methods=["POST"]),
            Route("/_wipe", wipe, methods=["POST"]),
        ]
    )


STARTED = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="replica")
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--prefill-rate", type=float, default=0.0, help="tokens a second; 0 takes no time")
    parser.add_argument("--decode-ms", type=float, default=0.0, help="a token")
    parser.add_argument("--tier", type=Path, default=None, help="block keys are kept here over a restart")
    options = parser.parse_args()
    replica = Replica(options.name, options.blocks, options.prefill_rate, options.decode_ms, options.tier)
    uvicorn.run(build(replica), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
