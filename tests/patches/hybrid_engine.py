"""vLLM's real scheduler with a real offload tier over a hybrid model's KV cache groups, stepped by hand.

What is real: vLLM's `Scheduler`, KV cache manager, `OffloadingConnector`, its scheduler half, `CPUOffloadingManager`,
and the KV cache groups that vLLM makes of the layers. What is not there: a model and a worker. Each step answers as a
worker would that computes what was scheduled and has finished every transfer.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

BLOCK = 528  # tokens a block, the size that a Qwen3-Next gets from matching attention to GDN pages
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
EOS = 2


class Engine:
    """One scheduler with its tier, stepped by hand."""

    def __init__(self, *, mtp: bool, draft_marked: bool = False, prompt_only: bool = True, block: int = BLOCK) -> None:
        from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
        from vllm.engine import arg_utils
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        tokens = 50_000 if block == BLOCK else 2_000
        config = VllmConfig(
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=8 * block,
                max_model_len=tokens,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=False,
            ),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        )
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = block
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = "LBNHC"  # what the engine core resolves before it builds a scheduler
        if mtp and hasattr(arg_utils, "PREFIX_CACHE_RETENTION_INTERVAL_UNSET"):
            # What 0.29's argument parser resolves for a hybrid model with MTP: keep every recurrent state.
            config.cache_config.prefix_cache_retention_interval = None
        config.model_config = _model(tokens)
        config.speculative_config = _mtp() if mtp else None
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 30, "offload_prompt_only": prompt_only},
        )
        caches = _kv_cache_config(config, block, mtp=mtp, draft_marked=draft_marked)
        self.groups = [type(g.kv_cache_spec).__name__ for g in caches.kv_cache_groups]
        config.cache_config.num_gpu_blocks = caches.num_blocks
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
        self.tier = self.scheduler.connector.connector_scheduler
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self.stored: dict[tuple[str, int], set[int]] = {}  # (request, group) to the chunks handed to the tier
        self._states: dict[str, Any] = {}
        self.offers: list[tuple[str, int, int | None]] = []
        ask = self.tier.get_num_new_matched_tokens

        def watched(request: Any, computed: int, *rest: Any, **named: Any) -> Any:
            answer = ask(request, computed, *rest, **named)
            self.offers.append((request.request_id, computed, answer[0]))
            return answer

        self.tier.get_num_new_matched_tokens = watched

    def add(self, name: str, prompt: list[int], outputs: int = 4) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=outputs)
        sampling.update_from_generation_config({}, EOS)
        known = inspect.signature(Request.__init__).parameters
        optional = {"mm_features": None, "eos_token_id": EOS}
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **{k: v for k, v in optional.items() if k in known},
        )
        self.scheduler.add_request(request)
        self._states[name] = self.tier._req_status[name]
        return request

    def step(self) -> Any:
        """One engine step: schedule, compute, finish every transfer that is under way."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        running = list(output.num_scheduled_tokens)
        sampled = [[self._token(output, r)] if self._samples(output, r) else [] for r in running]
        done = {job: 1 for job in self.tier._jobs}
        loaded = {job.req_id for job in self.tier._jobs.values() if not job.is_store}
        self._count_stores()
        result = ModelRunnerOutput(
            req_ids=running,
            req_id_to_index={r: i for i, r in enumerate(running)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=loaded or None,
                kv_connector_worker_meta=_worker_metadata(done),
            ),
        )
        self.scheduler.update_from_output(output, result)
        return metadata

    def run(self, steps: int = 400) -> None:
        """Step until every request is finished and every transfer with it."""
        for _ in range(steps):
            if not self.scheduler.requests and not self.tier._jobs and not self.scheduler.finished_req_ids:
                return
            self.step()
        raise AssertionError(f"not finished after {steps} steps: {self.offers[-3:]}")

    def forget_gpu(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def _samples(self, output: Any, name: str) -> bool:
        request = self.scheduler.requests[name]
        # num_computed_tokens has the scheduled ones already
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _token(self, output: Any, name: str) -> int:
        return 7 + self.scheduler.requests[name].num_output_tokens

    def _count_stores(self) -> None:
        for job in self.tier._jobs.values():
            for group, state in enumerate(self._states[job.req_id].group_states) if job.is_store else ():
                chunks = {i for i, key in enumerate(state.offload_keys) if key in job.keys}
                self.stored.setdefault((job.req_id, group), set()).update(chunks)

    def chunks(self, name: str, group: int) -> list[int]:
        return sorted(self.stored.get((name, group), ()))

    @property
    def attention(self) -> int:
        """Index of the attention group."""
        return self.groups.index("FullAttentionSpec")


def _worker_metadata(done: dict[int, int]) -> Any:
    from importlib import import_module

    return import_module(f"{OFFLOADING}.common").OffloadingWorkerMetadata(completed_jobs=done)


def _model(tokens: int) -> Any:
    """What the scheduler asks of a model configuration; a real one would import a model for a minute to know it."""
    return SimpleNamespace(
        model="tiny-hybrid",
        max_model_len=tokens,
        original_max_model_len=tokens,
        is_encoder_decoder=False,
        multimodal_config=None,
        is_multimodal_model=False,
        is_moe=False,
        skip_tokenizer_init=True,
        logits_processors=None,
        architecture="TinyHybrid",
        architectures=["TinyHybrid"],
        supports_multimodal_inputs=False,
        is_mm_prefix_lm=False,
        is_diffusion=False,
        runner_type="generate",
        use_mla=False,
        uses_mrope=False,
        uses_xdrope=False,
        enable_return_routed_experts=False,
        return_sampling_mask=False,
        dtype=None,
        get_total_num_kv_heads=lambda: 1,
        get_total_num_hidden_layers=lambda: 16,
    )


def _mtp() -> Any:
    """vLLM's own speculative configuration for one MTP layer, without its checks of a draft model on disk."""
    from vllm.config import SpeculativeConfig

    config = object.__new__(SpeculativeConfig)
    for name, value in inspect.getmembers(SpeculativeConfig):
        if not name.startswith("_") and not callable(value) and not isinstance(value, property):
            config.__dict__.setdefault(name, value)
    fields = getattr(SpeculativeConfig, "__dataclass_fields__", {})
    for name, field in fields.items():
        config.__dict__.setdefault(name, None if not isinstance(field.default, bool | int | str) else field.default)
    config.__dict__.update(method="mtp", num_speculative_tokens=1, model="tiny-hybrid")
    return config


def _kv_cache_config(config: Any, block: int, *, mtp: bool, draft_marked: bool) -> Any:
    """Groups as vLLM makes them: four attention and twelve GDN layers, and with MTP a fifth attention layer."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
    gdn = MambaSpec(
        block_size=block,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=int(mtp),
    )
    # In the order of their registration: the MTP layer comes after the model's own.
    layers = {f"model.layers.{i}": attention if i % 4 == 3 else gdn for i in range(16)}
    if mtp:
        layers["model.layers.16"] = attention
    bytes_for_blocks = 3000 * attention.page_size_bytes
    caches = get_kv_cache_configs(config, [layers], [bytes_for_blocks])[0]
    if draft_marked:
        marked = next(g for g in caches.kv_cache_groups if isinstance(g.kv_cache_spec, FullAttentionSpec))
        marked.is_eagle_group = True
    return caches
