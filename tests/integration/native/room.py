"""vLLM's real scheduler, KV cache manager and offloading connector with this door's two sides, stepped by hand.

What is not there is a model: each step writes into the blocks it computes what is a function of all tokens before, so
that every block that is read later can be checked against what it must hold. Runs in any release that this door
serves; as a program it runs scenarios of `scenarios` and prints what they returned as JSON.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EOS = 2
POOL_BLOCKS = 200
HEAD = 64  # 8 KiB a block and layer


class Room:
    """One engine without a model.

    `hybrid`: one attention layer in four, the others with a recurrent state, or, with a `window` of so many tokens,
    with attention to what is within it. `separate`: scheduler and worker do not
    share an open store. What else is given goes into the connector's extra config.
    """

    def __init__(
        self,
        root: Path,
        *,
        hybrid: bool = False,
        window: int = 0,
        block: int = 16,
        blocks: int = POOL_BLOCKS,
        **extra: Any,
    ) -> None:
        from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from lmcache_nvme_backend.doors.native import shared_store

        config = VllmConfig(
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=8 * block,
                max_model_len=2_000,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        if hybrid:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = block
        config.cache_config.kv_cache_layout = "LBNHC"
        config.model_config = _model()
        policy = extra.pop("policy", "recompute")
        separate = extra.pop("separate", False)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=extra.pop("connector", "NvmeOffloadingConnector"),
            kv_connector_module_path=extra.pop("module", "lmcache_nvme_backend"),
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                "spec_name": "NvmeOffloadingSpec",
                "spec_module_path": "lmcache_nvme_backend",
                "root_dir": str(extra.pop("root_dir", root)),
                "quota_gib": 0.01,
                "staging_mib": 1,
                "model_fingerprint": "room",
                **extra,
            },
        )
        self.block, self.config = block, config
        self.caches = _kv_cache_config(config, block, blocks, hybrid, window)
        self.groups = [type(group.kv_cache_spec).__name__ for group in self.caches.kv_cache_groups]
        config.cache_config.num_gpu_blocks = self.caches.num_blocks
        # As vLLM: the worker's side first.
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.caches)
        self.memory = _memory(self.caches)
        self.worker.register_kv_caches(self.memory)
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(self.caches, config)
        if separate:  # as in processes of their own: each side opens the namespace for itself
            shared_store._open.clear()
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=self.caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
        self.tier = self.scheduler.connector.connector_scheduler
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self.loads: list[tuple[str, int]] = []  # request and number of chunks of every load that was begun
        self.wrong: list[str] = []  # blocks that a step computed on and that held something else
        self.transfer_s = 0.0

    # -- a request ----------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], outputs: int = 2, **more: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=outputs)
        sampling.update_from_generation_config({}, EOS)
        known = inspect.signature(Request.__init__).parameters
        optional = {"mm_features": None, "eos_token_id": EOS, **more}
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **{k: v for k, v in optional.items() if k in known},
        )
        self.scheduler.add_request(request)
        return request

    def serve(self, name: str, prompt: list[int], **more: Any) -> int:
        """Run one request to its end; the tokens of its prompt that came from the tier in the last load it needed."""
        request = self.add(name, prompt, **more)
        self.run()
        return self._external.get(request.request_id, 0)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, as a restart would."""
        assert self.scheduler.reset_prefix_cache()

    def wait_stored(self) -> None:
        assert self.side.stores.wait_for_writes(10)

    @property
    def side(self) -> Any:
        """This door's worker."""
        return self.worker.connector_worker.worker

    @property
    def manager(self) -> Any:
        return self.tier.manager

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, deadline_s: float = 60.0) -> None:
        """Step until every request is finished and every transfer with it."""
        self._external: dict[str, int] = {}
        end = time.monotonic() + deadline_s
        while self.scheduler.requests or self.tier._jobs or self.scheduler.finished_req_ids:
            assert time.monotonic() < end, f"not finished: {list(self.scheduler.requests.values())}"
            self.step()
        assert not self.wrong, self.wrong

    def step(self) -> Any:
        """One engine step, with the calls of vLLM's model runner in its order."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        for job in metadata.load_jobs.values():
            self.loads.append((job.req_id, len(job.src_spec.keys)))
            request = self.scheduler.requests[job.req_id]
            self._external[job.req_id] = request.num_computed_tokens
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        for copy in output.kv_cache_block_copies or ():
            for tensor in self.memory.values():
                tensor[copy.dst_block_id] = tensor[copy.src_block_id]
        running = list(output.num_scheduled_tokens)
        for name in running:
            self._compute(name, output.num_scheduled_tokens[name])
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        answer = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        sampled = [[7 + self.scheduler.requests[r].num_output_tokens] if self._samples(r) else [] for r in running]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=running,
                req_id_to_index={r: i for i, r in enumerate(running)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=answer,
            ),
        )
        return metadata

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _compute(self, name: str, scheduled: int) -> None:
        """Check what the request stands on, then write what this step computes."""
        request = self.scheduler.requests[name]
        after = request.num_computed_tokens  # has the scheduled ones already
        before = after - scheduled
        tokens = list(request.all_token_ids)
        table = self.scheduler.kv_cache_manager.get_block_ids(name)
        salt = str(getattr(request, "cache_salt", None)) + str(getattr(request, "lora_request", None))
        for index, group in enumerate(self.caches.kv_cache_groups):
            blocks = table[index]
            if self.groups[index] == "MambaSpec":
                if before and before % self.block == 0:
                    self._check(name, group, blocks[before // self.block - 1], tokens[:before], salt)
                self._write(group, blocks[(after - 1) // self.block], tokens[:after], salt)
                continue
            window = getattr(group.kv_cache_spec, "sliding_window", None) or before
            for i in range(max(0, before - window + 1) // self.block, before // self.block):
                self._check(name, group, blocks[i], tokens[: (i + 1) * self.block], salt)
            for i in range(before // self.block, -(-after // self.block)):
                self._write(group, blocks[i], tokens[: min(after, (i + 1) * self.block)], salt)

    def _check(self, name: str, group: Any, block: int, tokens: list[int], salt: str) -> None:
        for layer in group.layer_names:
            size = self._state_bytes(group) or self._page(layer)
            if (
                bytes(self.memory[layer][block].numpy()[:size])
                != _content(layer, tokens, salt, self._page(layer))[:size]
            ):
                self.wrong.append(f"{name}: {layer}, block {block}, {len(tokens)} tokens")

    def _write(self, group: Any, block: int, tokens: list[int], salt: str) -> None:
        import numpy as np

        for layer in group.layer_names:
            content = _content(layer, tokens, salt, self._page(layer))
            self.memory[layer][block].numpy()[:] = np.frombuffer(content, np.int8)

    def _page(self, layer: str) -> int:
        return int(self.memory[layer].shape[1])

    def _state_bytes(self, group: Any) -> int:
        """Of a recurrent layer's page, what is not padding; 0 for attention."""
        return sum(4 * math.prod(shape) for shape in getattr(group.kv_cache_spec, "shapes", ()))


def _content(layer: str, tokens: list[int], salt: str, nbytes: int) -> bytes:
    return hashlib.shake_128(f"{layer}{salt}{tokens}".encode()).digest(nbytes)


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [10 + (seed * 7919 + i * 31 + i // 3) % 900 for i in range(tokens)]


def chunk_files(root: Path) -> list[Path]:
    """Every chunk on the disk, heads of prefixes first."""
    return sorted(root.glob("v1/*/*/*.kv"), key=lambda path: int(path.name.split("-")[1], 16))


def damage(file: Path) -> None:
    """Flip a byte of its payload."""
    data = bytearray(file.read_bytes())
    data[4096 + 100] ^= 0xFF
    file.write_bytes(data)


def _model() -> Any:
    """What is asked of a model configuration; a real one would import a model for a minute to know it."""
    import torch

    return SimpleNamespace(
        model="tiny", revision=None, seed=0, max_model_len=2_000, original_max_model_len=2_000,
        is_encoder_decoder=False, multimodal_config=None, is_multimodal_model=False, is_moe=False,
        skip_tokenizer_init=True, logits_processors=None, architecture="Tiny", architectures=["Tiny"],
        supports_multimodal_inputs=False, is_mm_prefix_lm=False, is_diffusion=False, runner_type="generate",
        use_mla=False, uses_mrope=False, uses_xdrope=False, enable_return_routed_experts=False,
        return_sampling_mask=False, dtype=torch.float32, quantization=None, enable_prompt_embeds=False,
        hf_config=SimpleNamespace(hidden_size=8), get_total_num_kv_heads=lambda: 1,
        get_total_num_hidden_layers=lambda: 4, get_head_size=lambda: HEAD,
    )  # fmt: skip


def _kv_cache_config(config: Any, block: int, blocks: int, hybrid: bool, window: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)
    recurrent = MambaSpec(
        block_size=block,
        shapes=((32, 32),),  # 4 KiB, less than a page: what is behind it is padding
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    windowed = SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=HEAD, dtype=torch.float32, sliding_window=window or 1
    )
    other = recurrent if hybrid else windowed if window else attention
    layers = {f"model.layers.{i}": other if i % 4 != 3 else attention for i in range(4)}
    pages = blocks * (1 if other is not attention else 4)
    return get_kv_cache_configs(config, [layers], [pages * attention.page_size_bytes])[0]


def _memory(caches: Any) -> dict[str, Any]:
    """Each layer's blocks as vLLM places them, `[blocks, bytes]`: layers of different groups share their memory."""
    import torch

    backing: dict[int, Any] = {}
    memory = {}
    specs = {name: group.kv_cache_spec for group in caches.kv_cache_groups for name in group.layer_names}
    for tensor in caches.kv_cache_tensors:
        flat = backing.setdefault(tensor.size, torch.zeros(tensor.size, dtype=torch.int8))
        for i, layer in enumerate(tensor.layers):
            start = tensor.offset + i * tensor.layer_stride
            page = specs[layer].page_size_bytes
            memory[layer] = torch.as_strided(flat, (caches.num_blocks, page), (tensor.block_stride, 1), start)
    return memory


if __name__ == "__main__":
    import vllm

    from tests.integration.native import scenarios

    root, *names = sys.argv[1:]
    answers: dict[str, Any] = {"vllm": vllm.__version__.partition("+")[0]}
    for name in names:
        folder = Path(root) / name
        folder.mkdir()
        answers[name] = getattr(scenarios, name)(folder)
    print(json.dumps(answers), flush=True)
