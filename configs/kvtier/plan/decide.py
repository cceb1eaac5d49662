"""From facts, model and wishes to a plan: the order of the rules."""

from __future__ import annotations

from kvtier.detect.memory import main_devices
from kvtier.facts import Facts, Memory
from kvtier.geometry import checkpoint, kv
from kvtier.plan import hosts, lmcache, memory, native, spec, speculation
from kvtier.plan.advice import advise, remarks
from kvtier.plan.draft import Draft, Refusal
from kvtier.plan.estimate import estimates
from kvtier.plan.result import Alternative, Decision, Effect, Plan
from kvtier.plan.wishes import ENGINES, Wishes
from kvtier.units import gib
from lmcache_nvme_backend.errors import ConfigError

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def plan(facts: Facts, model: str, wishes: Wishes) -> Plan:
    """Decide which tier stands behind the pool of `model` on this box.

    Raises:
        ConfigError: something the user said cannot be, such as a size larger than the disk.
    """
    found = checkpoint.find(model)
    ranks = wishes.tp or max(len(wishes.nodes or facts.nodes), 1)
    _enough_devices(facts, wishes, ranks)
    geometry = kv.read(found, kv_cache_dtype=wishes.kv_cache_dtype, tensor_parallel=ranks)
    draft = Draft(facts=facts, checkpoint=found, geometry=geometry, wishes=wishes)
    if geometry.max_tokens and wishes.max_model_len and wishes.max_model_len > geometry.max_tokens:
        raise ConfigError(
            "--max-model-len",
            str(wishes.max_model_len),
            f"at most {geometry.max_tokens}",
            "That is what the model's configuration allows.",
        )
    try:
        _decide(draft)
        _refuse_allocator(draft)
    except Refusal:
        draft.decision = Decision.REFUSED
    return draft.finish()


def _decide(draft: Draft) -> None:
    _refuse_engine(draft)
    _say_box(draft)
    _refuse_ram(draft)
    _common_arguments(draft)
    speculation.arguments(draft)
    _advise(draft)
    if draft.geometry.attention_free:
        draft.say(
            "no-kv-to-keep", Effect.CHOSE, "no layer of this model keeps KV for a token, so a tier would hold nothing."
        )
        if draft.memory is Memory.UNIFIED:
            memory.kv_pool_bytes(draft, 0)
        _without_tier(draft)
        return
    if draft.memory is Memory.DISCRETE:
        _discrete(draft)
    elif draft.memory is Memory.UNIFIED:
        _unified(draft)
    else:
        _cpu(draft)
    speculation.patches(draft)
    draft.estimates = estimates(draft)


def _advise(draft: Draft) -> None:
    """What an engine said of its pool decides the three flags that shape it."""
    figures = draft.wishes.figures
    if figures is None:
        draft.say(
            "pool-not-known",
            Effect.NOTED,
            "--gpu-memory-utilization, --max-num-seqs and --max-num-batched-tokens are left to vLLM: start once and "
            "plan again with --log, or see `kvtier doctor --url`.",
        )
        return
    draft.say("pool-seen", Effect.NOTED, f"{figures.source}: {'; '.join(remarks(figures))}.")
    if figures.pool_tokens and figures.pool_tokens < draft.wished_context:
        draft.say(
            "context-exceeds-seen-pool",
            Effect.WARNED,
            f"one context of {draft.wished_context:,} tokens is more than the {figures.pool_tokens:,} that "
            f"{figures.source} shows: vLLM does not start so. Give --max-model-len "
            f"{figures.pool_tokens // 256 * 256} or less.",
        )
    for advice in advise(figures, draft.facts, draft.wishes.typical_tokens):
        draft.args += [advice.flag, advice.honest]
        was = "" if advice.right else f" (was {advice.found})"
        draft.say(
            f"honest{advice.flag.removeprefix('-')}",
            Effect.CHANGED,
            f"{advice.flag} {advice.honest}{was}: {advice.why}.",
        )


def _discrete(draft: Draft) -> None:
    if draft.serving_nodes:
        raise draft.refuse(
            "several-hosts-with-discrete",
            "several hosts are planned for unified memory only: vLLM's tiers are shared memory of one host. Start one "
            "engine a host and route by prefix.",
        )
    if draft.wishes.nvme is not None or draft.wishes.nvme_gib is not None:
        native.ram_and_nvme(draft)
    else:
        native.ram(draft)
    _weights_fit(draft)
    if draft.facts.wsl:
        draft.say(
            "wsl-pins-little",
            Effect.WARNED,
            "WSL2 lets a process pin only a part of the memory given to it: if the tier stays pageable, copies are "
            "slow; raise `memory` in .wslconfig.",
        )


def _refuse_ram(draft: Draft) -> None:
    """Whatever the model: RAM asked for is refused where it is the pool's own memory."""
    if draft.wishes.ram_gib is None:
        return
    if draft.memory is Memory.UNIFIED:
        raise draft.refuse(
            "unified-refuses-ram",
            "device and host share one DRAM here: a RAM tier would take its bytes from the memory that the KV pool "
            "itself lives in. Leave --ram-gib out: the tier is NVMe.",
        )
    if draft.memory is Memory.CPU:
        raise draft.refuse(
            "cpu-refuses-ram",
            "without a device the KV pool is host RAM already, and vLLM's RAM tier refuses the CPU. Leave --ram-gib "
            "out: the tier is NVMe.",
        )


def _unified(draft: Draft) -> None:
    draft.say(
        "unified-refuses-ram", Effect.NOTED, "no RAM tier: its bytes would come from the memory the KV pool lives in."
    )
    pool = memory.kv_pool_bytes(draft, _staging(draft))
    if pool is not None:
        memory.fit_context(draft, pool)
        draft.args += ["--kv-cache-memory-bytes", str(pool)]
    memory.warn_of_swap(draft)
    if draft.geometry.hybrid:
        _unified_hybrid(draft)
    else:
        lmcache.nvme(draft)
        _offer_spec(draft)
    if pool is not None:
        draft.add_pool(pool)


def _staging(draft: Draft) -> int:
    """Host memory that the tier will own, a rank."""
    if draft.geometry.hybrid:
        return spec.STAGING if spec.offered(draft) else 0
    return lmcache.staging_bytes(draft)


def _unified_hybrid(draft: Draft) -> None:
    draft.say(
        "hybrid-needs-hybrid-manager",
        Effect.NOTED,
        'LMCacheConnectorV1 ends the start of a hybrid model ("Failed to promote '
        'local KV cache specs to one unified type"), and --disable-hybrid-kv-cache-manager does not help.',
    )
    if spec.offered(draft):
        spec.nvme(draft)
    else:
        draft.say(
            "nvme-spec-not-offered", Effect.NOTED, f"this project's offloading spec is not for {spec.why_not(draft)}."
        )
    if native.has_disk_connector(draft) and not draft.serving_nodes:
        draft.alternatives.append(
            Alternative(
                name="vLLM's disk connector",
                loses="everything at a restart",
                how="by hand: SimpleCPUOffloadConnector with kv_offload_backend: disk"
                if spec.offered(draft)
                else "what this plan emits",
            )
        )
        if not spec.offered(draft):
            native.disk_only(draft)
    elif not spec.offered(draft):
        why = (
            "several hosts"
            if draft.serving_nodes
            else (f"vLLM {draft.target}" if not draft.target_at_least(0, 28) else "this device")
        )
        draft.say(
            "unified-hybrid-no-tier",
            Effect.CHOSE,
            f"no tier: vLLM's disk-only connector, which takes hybrid models, does not "
            f"exist for {why} (it needs 0.28, an NVIDIA device and one host).",
        )
        _without_tier(draft)
    if draft.target_at_least(*native.FIRST_TIERING):
        draft.alternatives.append(
            Alternative(
                name="vLLM's RAM and fs tiers with the smallest RAM tier",
                loses="the RAM tier's bytes, taken from the KV pool's "
                "memory; a quota; and where one step writes more than that RAM tier holds, the rest is not stored",
                how="by hand: TieringOffloadingSpec with a cpu_bytes_to_use of 1 or 2 GiB; kvtier does not emit it",
            )
        )
    draft.alternatives += [
        Alternative(
            name="the pool alone",
            loses="every prefix that the pool evicts",
            how="this plan's arguments without --kv-transfer-config",
        ),
        Alternative(
            name="a dense or MLA model of that size",
            loses="the hybrid's small KV",
            how="the LMCache disk tier, which survives restarts",
        ),
    ]


def _offer_spec(draft: Draft) -> None:
    """The other door to the same store, for a model that both can serve."""
    if spec.offered(draft):
        draft.alternatives.append(
            Alternative(
                name="this project's offloading spec, without LMCache",
                loses="the chunks that this plan's tier has stored: the two name them differently",
                how="by hand: NvmeOffloadingConnector and NvmeOffloadingSpec in --kv-transfer-config (docs/doors.md)",
            )
        )


def _without_tier(draft: Draft) -> None:
    if draft.serving_nodes and draft.memory is Memory.UNIFIED:
        hosts.split(draft)


def _weights_fit(draft: Draft) -> None:
    """On a device with memory of its own: say so where a rank's weights are more than that."""
    weights, devices = draft.checkpoint.weights_bytes, main_devices(draft.facts.devices)
    size = devices[0].memory_bytes if devices else None
    if weights and size and weights // draft.world_size > size:
        needed = -(-weights // (size * 4 // 5))
        draft.say(
            "weights-exceed-device",
            Effect.WARNED,
            f"{gib(weights)} of weights over {draft.world_size} rank(s) do not fit "
            f"{gib(size)} a device: the engine will not start. It takes some {needed} such devices (--tp), or smaller "
            "weights.",
        )


def _cpu(draft: Draft) -> None:
    if (draft.checkpoint.weights_bytes or 0) > draft.facts.ram_available - memory.reserve(draft.facts) // 2:
        raise draft.refuse(
            "weights-do-not-fit",
            f"{gib(draft.checkpoint.weights_bytes or 0)} of weights are more than the "
            f"{gib(draft.facts.ram_available)} of RAM available.",
        )
    pool = memory.cpu_pool_gib(draft)
    draft.env[memory.CPU_POOL] = str(pool)
    own = memory.CPU_POOL in draft.facts.environment
    draft.say(
        "cpu-pool",
        Effect.CHANGED,
        f"{memory.CPU_POOL}={pool}: "
        + ("your environment's." if own else "a third of what the weights leave of the available RAM, at most 16 GiB."),
    )
    memory.fit_context(draft, pool << 30)
    if draft.geometry.hybrid:
        if spec.offered(draft):
            spec.nvme(draft)
            draft.add_pool(pool << 30)
            return
        draft.say(
            "cpu-hybrid-no-tier",
            Effect.CHOSE,
            "no tier: LMCache's in-process connector cannot run a hybrid model, vLLM's own tiers refuse the CPU, and "
            f"this project's offloading spec is not for {spec.why_not(draft)}.",
        )
        return
    lmcache.nvme(draft)
    _offer_spec(draft)
    draft.add_pool(pool << 30)


def _enough_devices(facts: Facts, wishes: Wishes, tensor_parallel: int) -> None:
    """One device a rank; on a CPU a rank takes cores, and their number is the user's."""
    if facts.memory is Memory.CPU:
        return
    here = max(len(main_devices(facts.devices)), 1)
    hosts = max(len(wishes.nodes or facts.nodes), 1)
    ranks = tensor_parallel * wishes.pp
    if ranks > here * hosts:
        asked = f"{tensor_parallel}" + (f" with --pp {wishes.pp}" if wishes.pp > 1 else "")
        found = f"{here} device(s)" + (f" on each of {hosts} hosts" if hosts > 1 else " on this box")
        raise ConfigError(
            "--tp",
            f"{asked}, which is {ranks} ranks for {found}",
            f"--tp x --pp of at most {here * hosts}",
            "Ask for fewer ranks, or name the hosts that serve together with --nodes.",
        )


def _say_box(draft: Draft) -> None:
    decided = next((entry for entry in draft.facts.evidence if entry.decides), None)
    because = f": {decided.finding} ({decided.source})" if decided else ""
    draft.say(f"memory-is-{draft.memory.value}", Effect.NOTED, f"{draft.memory.value} memory{because}.")
    if draft.facts.versions.vllm is None and draft.wishes.target_vllm is None:
        draft.say(
            "vllm-not-installed",
            Effect.WARNED,
            f"no vLLM is installed here: planned for {draft.target}. --target-vllm sets it.",
        )


def _refuse_engine(draft: Draft) -> None:
    engine = draft.wishes.engine
    if engine not in ENGINES:
        raise ConfigError("--engine", repr(engine), ", ".join(ENGINES), "Take vllm.")
    if engine == "sglang":
        raise draft.refuse(
            "sglang-not-offered",
            "SGLang is not offered: its hierarchical cache puts every tier behind a pool in host RAM, which unified "
            "memory must not give, and nothing of this project has been run with it.",
        )


def _refuse_allocator(draft: Draft) -> None:
    if not draft.offloads:
        return
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in draft.facts.environment.get(name, "").replace(" ", "").lower():
            raise draft.refuse(
                "expandable-segments",
                f"{name} holds expandable_segments:True, with which a KV connector must not run (vLLM checks only the "
                "older of the two names). Unset it.",
            )


def _common_arguments(draft: Draft) -> None:
    wishes = draft.wishes
    if wishes.max_model_len:
        draft.args += ["--max-model-len", str(wishes.max_model_len)]
    if wishes.kv_cache_dtype != "auto":
        draft.args += ["--kv-cache-dtype", wishes.kv_cache_dtype]
    if draft.tensor_parallel > 1:
        draft.args += ["--tensor-parallel-size", str(draft.tensor_parallel)]
    if wishes.pp > 1:
        draft.args += ["--pipeline-parallel-size", str(wishes.pp)]
    draft.args.append("--enable-prefix-caching")
    draft.say(
        "prefix-caching-on",
        Effect.NOTED,
        "--enable-prefix-caching: prefix reuse is the whole benefit; a tier does nothing for a single long request "
        "that fits, and nothing for decode speed per pass.",
    )
