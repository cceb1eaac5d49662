"""Several hosts that serve one model together, such as a pair of DGX Sparks: one plan, each host's part."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from kvtier.plan.disk import Place
from kvtier.plan.draft import Draft, transfer_arguments
from kvtier.plan.result import Effect, NodePlan
from lmcache_nvme_backend.errors import ConfigError

_MASTER_PORT = 29501
_MARKED = ("LMCACHE_CONFIG_FILE", "PYTHONHASHSEED", "VLLM_HOST_IP")
"""Variables whose presence in the engine's process shows that the environment reached it."""


def split(draft: Draft, lmcache: Callable[[str], dict[str, Any]] | None = None, place: Place | None = None) -> None:
    """Give each host its arguments, environment and LMCache configuration (`lmcache` makes one for a directory).

    Raises:
        ConfigError: the tensor-parallel ranks do not divide over the hosts.
    """
    nodes = draft.serving_nodes
    if draft.tensor_parallel % len(nodes):
        raise ConfigError(
            "--tp",
            str(draft.tensor_parallel),
            f"a multiple of the {len(nodes)} hosts",
            f"Give --tp {len(nodes)} for one rank a host.",
        )
    if lmcache is not None:
        _say_rules(draft)
    draft.say(
        "environment-reaches-every-host",
        Effect.WARNED,
        "the environment set here does not travel to the other host by itself: run each host's check once it serves.",
    )
    base = [*draft.args, "--distributed-executor-backend", "mp", "--nnodes", str(len(nodes))]
    for rank, node in enumerate(nodes):
        path = f"{place.path}/rank-{rank}" if place else None
        env = {**draft.env, "VLLM_HOST_IP": node.address}
        if node.interface:
            env |= {"NCCL_SOCKET_IFNAME": node.interface, "GLOO_SOCKET_IFNAME": node.interface}
        args = [
            "--node-rank",
            str(rank),
            "--master-addr",
            nodes[0].address,
            "--master-port",
            str(_MASTER_PORT),
            *(["--headless"] if rank else []),
        ]
        marks = [word for name in _MARKED if name in env for word in ("--expect", f"{name}={env[name]}")]
        # Two shells read it: the one here and the one there.
        remote = " ".join(shlex.quote(shlex.quote(word)) for word in ["kvtier", "doctor", "--engine-env", *marks])
        draft.nodes.append(
            NodePlan(
                name=node.name,
                rank=rank,
                vllm_args=[*base, *args, *transfer_arguments(draft.connector)],
                env=env,
                lmcache_config={**lmcache(path), "lookup_server_worker_ids": [0]} if lmcache and path else None,
                check=f"ssh {shlex.quote(node.name)} {remote}",
            )
        )
        if place and path:
            draft.add_tier(f"nvme ({node.name})", place.size, path, hosts=len(nodes))
        if rank == 0:
            first = args
    draft.args, draft.env, draft.lmcache = [*base, *first], draft.nodes[0].env, draft.nodes[0].lmcache_config


def _say_rules(draft: Draft) -> None:
    draft.say(
        "rank-0-answers-lookups",
        Effect.CHANGED,
        "lookup_server_worker_ids: [0]: LMCache asks its ranks over Unix sockets, and a rank on another host never "
        "answers, so that each lookup would wait for its time-out and find nothing.",
    )
    draft.say("own-directory-a-rank", Effect.CHANGED, "each rank has a directory of its own on its own host's disk.")
    draft.say(
        "lost-node-cache",
        Effect.NOTED,
        "where one host's cache is lost, rank 0 still promises the prefix, the other rank's load fails, and vLLM "
        "computes from there: slower, not wrong, and no request fails.",
    )
