"""Engine steps in which a load failed: what such a step computes must not be stored.

vLLM finds out after the step that blocks were not loaded, and computes them again. But the step's forward pass has used
them already, so the KV of every later token in it is worthless, and LMCache stores it all the same. So it is for
the other ranks of a tensor-parallel group, whose layers see the failed rank's results: the ranks agree on it before
they store. Requests of the step may share the failed blocks, so none of them is stored.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.lmcache_nvme_backend")


def loading_requests(metadata: Any) -> list[Any]:
    """The requests of a step's connector metadata that were to load from LMCache."""
    return [r for r in getattr(metadata, "requests", ()) if r.load_spec is not None and r.load_spec.can_load]


def failed_on_any_rank(failed_here: bool, vllm_config: Any) -> bool:
    """Whether a load of this step failed on any rank whose results this rank computes with.

    Called by every rank of the group in the same steps: those that load, which the scheduler told all of them. Pipeline
    stages cannot wait for each other inside a step, so with several of them every loading step counts as failed.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return True
    if parallel.tensor_parallel_size <= 1:
        return failed_here
    try:
        import torch
        from vllm.distributed.parallel_state import get_tp_group

        flag = torch.tensor([int(failed_here)], dtype=torch.int32)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
        return bool(flag.item())
    except Exception:
        logger.exception("lmcache_nvme_backend: the ranks could not agree; this step is not stored")
        return True
