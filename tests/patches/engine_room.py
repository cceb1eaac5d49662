"""Runs inside a subprocess with an unpacked vLLM first on its path: the scenarios of `hybrid_engine.Engine`.

Reads one request a line on standard input, `{"overlay": DIR or null, "scenario": NAME, "arguments": {…}}`, where DIR is
a tree that holds a changed copy of vLLM's offloading scheduler, and answers each with one line on standard output. Each
request runs in a fork, so that each sees the file of its own overlay, while the slow imports are made once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid_engine import BLOCK, OFFLOADING, Engine


def _prompt(tokens: int, seed: int = 1) -> list[int]:
    return [10 + (seed * 7919 + i * 31) % 900 for i in range(tokens)]


def serve(mtp: bool = True, draft_marked: bool = False, tokens: int = 40_000, block: int = BLOCK) -> dict[str, Any]:
    """Compute a prompt, let the tier store it, empty the GPU pool, ask again: how many tokens does the tier serve?"""
    engine = Engine(mtp=mtp, draft_marked=draft_marked, block=block)
    prompt = _prompt(tokens)
    engine.add("first", prompt)
    engine.run()
    engine.forget_gpu()
    engine.offers.clear()
    engine.add("again", prompt)
    engine.run()
    return {
        "groups": sorted(engine.groups),
        "stored": [len(engine.chunks("first", g)) for g in range(len(engine.groups))],
        "served": engine.offers[0][2],
        "full_chunks": (tokens - 1) // block * block,
        "block": block,
    }


def partial_hit(
    tokens: int = 40_000, shared: int = 17 * BLOCK, stray: bool = False, block: int = BLOCK
) -> dict[str, Any]:
    """A prompt of which the GPU pool still has the head, and only the tier has the rest.

    With `stray`, the recurrent groups also hold a block without a hash below the computed part, as in the reports of
    vllm-project/vllm#46453.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    engine = Engine(mtp=True, block=block)
    prompt = _prompt(tokens)
    engine.add("first", prompt)
    engine.run()
    engine.forget_gpu()
    engine.add("head", prompt[:shared] + _prompt(600, seed=2))
    engine.run()
    engine.offers.clear()
    request = engine.add("again", prompt)
    told = engine.tier.update_state_after_alloc
    strays = {}

    def with_stray(asked: Any, blocks: Any, external: int) -> None:
        if asked is request and external and stray:
            groups = [list(group) for group in blocks.blocks]
            for index, group in enumerate(groups):
                if engine.groups[index] == "MambaSpec":
                    strays[index] = group[0] = KVCacheBlock(900_000 + index)
            blocks = KVCacheBlocks(tuple(groups))
        told(asked, blocks, external)

    engine.tier.update_state_after_alloc = with_stray
    metadata = engine.step()
    [job] = metadata.load_jobs.values()
    destination = job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1]
    _, local, served = engine.offers[0]
    engine.tier.update_state_after_alloc = told
    engine.run()
    return {
        "local": local,
        "served": served,
        "loaded_blocks": list(map(int, destination.group_sizes)),
        "first_loaded": list(map(int, destination.block_indices)),
        "into_stray": sorted(set(map(int, destination.block_ids)) & {b.block_id for b in strays.values()}),
        "attention": engine.attention,
        "block": block,
    }


def abort_queued() -> dict[str, Any]:
    """Abort a request that waits and never ran."""
    from vllm.v1.request import RequestStatus

    engine = Engine(mtp=False, block=16)
    engine.add("busy", _prompt(400))
    engine.add("queued", _prompt(100, seed=3))
    engine.step()
    engine.scheduler.finish_requests("queued", RequestStatus.FINISHED_ABORTED)
    engine.run()
    return {"stored": [engine.chunks("queued", g) for g in range(len(engine.groups))]}


def abort_running() -> dict[str, Any]:
    """Abort a request in the middle of its prefill: 8 of its 20 blocks are computed, a ninth may be allocated."""
    from vllm.v1.request import RequestStatus

    engine = Engine(mtp=True, block=16)
    engine.add("other", _prompt(40, seed=4), outputs=40)
    engine.add("cut", _prompt(320))
    engine.step()
    request = engine.scheduler.requests["cut"]
    computed = request.num_computed_tokens
    engine.scheduler.finish_requests("cut", RequestStatus.FINISHED_ABORTED)
    engine.run()
    return {"computed_chunks": computed // 16, "stored": engine.chunks("cut", engine.attention)}


def late_key() -> dict[str, Any]:
    """A chunk whose blocks are allocated and whose hash comes a step later."""
    engine = Engine(mtp=False, block=16)
    accept = engine.tier.manager.prepare_store
    engine.tier.manager.prepare_store = lambda *_: None  # the tier is full: nothing is stored yet
    request = engine.add("late", _prompt(40))
    engine.step()
    state = engine.tier._req_status["late"]
    group = state.group_states[engine.attention]
    missing = request.block_hashes.pop()
    for each in state.group_states:
        each.offload_keys.pop()
    engine.tier.manager.prepare_store = accept
    output = SimpleNamespace(num_scheduled_tokens={"late": 0}, finished_req_ids=set())
    engine.tier._build_store_jobs(output)
    engine._count_stores()
    first = engine.chunks("late", engine.attention)
    request.block_hashes.append(missing)
    state.update_offload_keys()
    engine.tier._build_store_jobs(output)
    engine._count_stores()
    assert len(group.block_ids) >= 2
    return {"first": first, "then": engine.chunks("late", engine.attention)}


def finish(extra: int, draft_marked: bool) -> dict[str, Any]:
    """A request that ends `extra` tokens after a chunk boundary, with its answer stored too."""
    block = 16
    engine = Engine(mtp=draft_marked, draft_marked=draft_marked, prompt_only=False, block=block)
    engine.add("ends", _prompt(4 * block + 8), outputs=block - 8 + extra)
    engine.run()
    return {"stored": engine.chunks("ends", engine.attention), "full": 5}


SCENARIOS = {f.__name__: f for f in (serve, partial_hit, abort_queued, abort_running, late_key, finish)}


def main() -> None:
    import vllm.config
    import vllm.v1.core.sched.scheduler

    assert f"{OFFLOADING}.scheduler" not in sys.modules
    print(json.dumps({"ready": True, "vllm": vllm.__version__, "from": vllm.__file__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _answer(request)
        os.waitpid(child, 0)


def _answer(request: dict[str, Any]) -> None:
    import importlib

    try:
        if request["overlay"]:
            package = importlib.import_module(OFFLOADING)
            package.__path__.insert(0, str(Path(request["overlay"]).joinpath(*OFFLOADING.split("."))))
        result: dict[str, Any] = {"result": SCENARIOS[request["scenario"]](**request["arguments"])}
    except BaseException as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        result = {
            "error": type(err).__name__,
            "message": str(err),
            "function": frame.name,
            "line": frame.line,
            "trace": traceback.format_exc(),
        }
    module = sys.modules.get(f"{OFFLOADING}.scheduler")
    print(json.dumps({**result, "module": getattr(module, "__file__", None)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
