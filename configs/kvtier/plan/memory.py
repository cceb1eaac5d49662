"""How much host memory a tier may have, and whether /dev/shm would hold it."""

from __future__ import annotations

from kvtier.facts import Facts, Vendor
from kvtier.plan.draft import Draft
from kvtier.plan.result import Effect, Step
from kvtier.units import GIB, MIB, gib
from lmcache_nvme_backend.errors import ConfigError

_RESERVE_SHARE = 0.15
_RESERVE_LEAST = 8 * GIB
"""Left to the host: the engine's own processes take 4 to 6 GiB, page cache and the rest of the system the others."""
_SHM_SLACK = 512 * MIB
"""/dev/shm also holds the engine's message queues and NCCL's buffers, and block alignment rounds the tier up."""
_UNIFIED_RESERVE_SHARE = 0.08
_UNIFIED_RESERVE_LEAST = 6 * GIB
_ACTIVATIONS_SHARE = 0.05
_ACTIVATIONS_LEAST = 2 * GIB
_CPU_POOL_MOST = 16 * GIB
CPU_POOL = "VLLM_CPU_KVCACHE_SPACE"
_CONTEXT_STEP = 256
_CONTEXT_LEAST = 2048
"""Tokens. A shorter context than this is no use for a tier, and hardly for a chat."""
_STATES_A_SEQUENCE = 2
"""Blocks of state that vLLM holds for one sequence with prefix caching: the running one and the one to be cached."""


def reserve(facts: Facts) -> int:
    """Bytes of RAM that no tier may take on a box whose device has memory of its own."""
    return max(_RESERVE_LEAST, int(facts.ram_total * _RESERVE_SHARE))


def uses_shm(draft: Draft, *, tiering: bool) -> bool:
    """Whether the CPU tier is mapped in /dev/shm: always under the tiering spec; the plain one since 0.27, save on
    ROCm."""
    return tiering or (draft.vendor is not Vendor.AMD and draft.target_at_least(0, 27))


def ram_tier(draft: Draft, *, tiering: bool) -> int:
    """Bytes for the RAM tier: as asked, or proposed.

    Raises:
        ConfigError: more was asked than the box has.
        Refusal: it does not fit beside the reserve or in /dev/shm.
    """
    facts, wished = draft.facts, draft.wishes.ram_gib
    kept = reserve(facts)
    budget = facts.ram_available - kept
    in_shm = uses_shm(draft, tiering=tiering)
    draft.say(
        "ram-reserve",
        Effect.NOTED,
        f"{gib(kept)} of the {gib(facts.ram_total)} of RAM stay with the host; {gib(facts.ram_available)} are "
        f"available, so a tier may take {gib(max(budget, 0))}.",
    )
    if wished is not None:
        size = wished * GIB
        if size > facts.ram_total:
            raise ConfigError(
                "--ram-gib",
                str(wished),
                f"less than this box's {gib(facts.ram_total)} of RAM",
                f"Ask for at most {max(budget, 0) // GIB}.",
            )
        if size > budget:
            raise draft.refuse(
                "ram-reserve-exceeded",
                f"--ram-gib {wished} is more than the {gib(max(budget, 0))} that are free beside the host's reserve "
                f"of {gib(kept)}. Ask for at most {max(budget, 0) // GIB}.",
            )
        if in_shm:
            _must_fit_shm(draft, size)
        return size
    room = min(budget, facts.shm_free - _SHM_SLACK) if in_shm else budget
    size = room // GIB * GIB
    if size < GIB or (draft.stored_bytes_per_token and size // draft.stored_bytes_per_token < draft.context // 8):
        if in_shm and facts.shm_free - _SHM_SLACK < budget:
            _shm_refusal(draft, max(budget // GIB * GIB, GIB))
        raise draft.refuse(
            "ram-too-small",
            f"only {gib(max(room, 0))} could be given to a tier, less than an eighth of one context of "
            f"{draft.context:,} tokens.",
        )
    limit = "what /dev/shm has free" if in_shm and room < budget else "what is available beside the host's reserve"
    draft.say("ram-size-proposed", Effect.CHOSE, f"{gib(size)}: {limit}, in whole GiB. --ram-gib sets it.")
    if in_shm and facts.shm_free - _SHM_SLACK < budget - GIB:
        draft.steps.append(
            Step(why="a larger RAM tier would need a larger /dev/shm", command=remount(draft, budget // GIB * GIB))
        )
    return size


def remount(draft: Draft, size: int) -> str:
    """The command that makes /dev/shm large enough for `size` bytes, in steps of 8 GiB."""
    used = draft.facts.shm_total - draft.facts.shm_free
    whole = -(-(size + used + _SHM_SLACK) // (8 * GIB)) * 8
    if draft.facts.container:
        return f"docker run --ipc=host …   # or --shm-size={whole}g"
    return f"mount -o remount,size={whole}G /dev/shm"


def kv_pool_bytes(draft: Draft, staging: int) -> int | None:
    """A fixed KV pool for one device that shares the host's DRAM, or None with the reason left in the draft.

    Pool = RAM - host reserve - staging ring - this rank's weights - room for activations and graphs. The weights come
    from the safetensors index. vLLM's own sizing takes the page cache of the checkpoint it has just read for used
    memory,
    so that the same flags pass or fail by what happens to be cached.
    """
    total, own = _shared_memory(draft.facts)
    kept = 0 if own else max(_UNIFIED_RESERVE_LEAST, int(total * _UNIFIED_RESERVE_SHARE))
    room = max(_ACTIVATIONS_LEAST, int(total * _ACTIVATIONS_SHARE))
    if draft.geometry.attention_free:
        draft.say(
            "fixed-kv-pool-left-out",
            Effect.NOTED,
            "no fixed KV pool: no layer keeps KV for a token, so vLLM sizes what holds the states itself.",
        )
        return None
    if draft.checkpoint.weights_bytes is None:
        draft.say(
            "fixed-kv-pool-left-out",
            Effect.WARNED,
            "no fixed KV pool: the weights' bytes are not known "
            f"({draft.checkpoint.weights_source}). vLLM will size the pool itself and count the page cache of the "
            "checkpoint as used memory; drop the cache first.",
        )
        return None
    ring = f" and {gib(staging)} with the staging ring" if staging else ""
    draft.say(
        "unified-reserve",
        Effect.NOTED,
        "the carve-out is the device's own, so the host's reserve lies outside it."
        if own
        else f"{gib(kept)} stay with the host{ring}.",
    )
    weights = draft.checkpoint.weights_bytes // draft.world_size
    pool = (total - kept - staging - weights - room) // (GIB // 4) * (GIB // 4)
    if pool <= 0:
        raise draft.refuse(
            "weights-do-not-fit",
            f"{gib(weights)} of weights a rank, {gib(kept)} for the host, "
            f"{gib(staging)} of staging and {gib(room)} for activations are more than the {gib(total)} that device "
            "and host share.",
        )
    draft.say(
        "fixed-kv-pool",
        Effect.CHANGED,
        f"--kv-cache-memory-bytes {pool}: {gib(total)} shared - {gib(kept)} host - {gib(staging)} staging - "
        f"{gib(weights)} weights a rank ({draft.checkpoint.weights_source}) - {gib(room)} activations and graphs = "
        f"{gib(pool)}. Fixed, because vLLM's own sizing counts the page cache of the checkpoint it has just read.",
    )
    return pool


def cpu_pool_gib(draft: Draft) -> int:
    """GiB for the KV pool of vLLM on a CPU (VLLM_CPU_KVCACHE_SPACE), which is host RAM: a third of what the weights
    leave, over all ranks. Where the environment sets that variable, vLLM takes its word."""
    own = draft.facts.environment.get(CPU_POOL, "")
    if own.isdigit() and int(own):
        return int(own)
    weights = draft.checkpoint.weights_bytes or 0
    spare = (draft.facts.ram_available - weights) // 3 // draft.world_size
    return max(1, min(spare, _CPU_POOL_MOST) // GIB)


def fit_context(draft: Draft, rank_bytes: int) -> None:
    """Shorten the context to what a pool of `rank_bytes` a rank holds: vLLM does not start with a pool that does not
    hold one request of --max-model-len.

    Sliding layers count in full, as LMCache's connector has them kept; a state counts twice.

    Raises:
        Refusal: not even 2,048 tokens fit.
    """
    per_token = draft.stored_bytes_per_token
    if not per_token:
        return
    states = _STATES_A_SEQUENCE * draft.geometry.state_bytes // draft.world_size
    holds = max(rank_bytes - states, 0) * draft.token_ranks // per_token
    wished = draft.wished_context
    if holds >= wished:
        return
    fits = holds // _CONTEXT_STEP * _CONTEXT_STEP
    if fits < _CONTEXT_LEAST:
        raise draft.refuse(
            "context-exceeds-pool",
            f"the KV pool of {gib(rank_bytes)} a rank holds {holds:,} tokens, fewer than {_CONTEXT_LEAST:,}: vLLM does "
            f"not start where one request of --max-model-len ({wished:,}) does not fit. A smaller model, smaller "
            "weights, or --kv-cache-dtype fp8 leave more.",
        )
    draft.longest = fits
    if "--max-model-len" in draft.args:
        draft.args[draft.args.index("--max-model-len") + 1] = str(fits)
    else:
        draft.args[:0] = ["--max-model-len", str(fits)]
    whose = "your --max-model-len" if draft.wishes.max_model_len else "the model's context"
    draft.say(
        "context-fits-pool",
        Effect.WARNED,
        f"--max-model-len {fits}, less than {whose} of {wished:,}: the KV pool of {gib(rank_bytes)} a rank holds "
        f"{holds:,} tokens, and vLLM does not start where one full context does not fit.",
    )


def warn_of_swap(draft: Draft) -> None:
    """Swap and zram catch what a fixed pool pins on shared memory."""
    if draft.facts.swap_total:
        what = "zram (compressed in the same RAM)" if draft.facts.zram_total >= draft.facts.swap_total else "swap"
        draft.say(
            "swap-catches-pool",
            Effect.WARNED,
            f"{gib(draft.facts.swap_total)} of {what} are on: under pressure the kernel pages the host's side out to "
            "make room, and the box crawls instead of failing.",
        )
        draft.steps.append(Step(why="keep the pool out of swap", command="swapoff -a"))


def _shared_memory(facts: Facts) -> tuple[int, bool]:
    """Bytes that the device shares with the host, and whether they are a carve-out that the host does not see.

    A driver that reports less than a fifth of the RAM reports a window (512 MiB on Strix Halo, 8 GiB on N1X), not a
    size.
    One that reports a part of the RAM means its socket's (MI300A).
    """
    shown = next((device.memory_bytes for device in facts.devices if device.memory_bytes), 0)
    if shown < facts.ram_total // 5:
        return facts.ram_total, False
    return shown, shown > facts.ram_total


def _must_fit_shm(draft: Draft, size: int) -> None:
    if size + _SHM_SLACK > draft.facts.shm_free:
        _shm_refusal(draft, size)


def _shm_refusal(draft: Draft, size: int) -> None:
    command = remount(draft, size)
    draft.steps.append(Step(why=f"/dev/shm must hold the tier of {gib(size)}", command=command, required=True))
    raise draft.refuse(
        "shm-too-small",
        f"the tier of {gib(size)} is mapped in /dev/shm, which has "
        f"{draft.facts.shm_free / MIB:,.0f} MiB free, and needs {_SHM_SLACK // MIB} MiB of slack: the engine would "
        f"not start. Run: {command}",
    )
