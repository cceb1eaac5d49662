"""A KV pool too small for its requests: what vLLM preempts, it reloads from NVMe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .conftest import CHUNK, text


def test_preempted_requests_reload_and_end_with_equal_text(start_engine, tmp_path):
    """Three requests whose answers do not fit into the pool together: each ends as it does alone."""
    prompts = [text(250, seed=30 + i) for i in range(3)]
    # 135 blocks of 32 tokens: three prompts of some 1,200 tokens fit, their answers do not: what is preempted
    # loses blocks to those that run on.
    args = ("--block-size", "32", "--num-gpu-blocks-override", "135", "--max-num-seqs", "4")
    with start_engine(tmp_path, args=args, spec={"max_model_len": 3072}) as engine:
        alone = []
        for prompt in prompts:
            alone.append(engine.ask(prompt, max_tokens=500, ignore_eos=True))
            engine.wait_stored()
        engine.forget()
        preempted = engine.engine.metrics().value("vllm:num_preemptions_total")
        loaded = engine.tokens("external_kv_transfer")
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda p: engine.ask(p, max_tokens=500, ignore_eos=True), prompts))
        metrics = engine.engine.metrics()
        assert metrics.value("vllm:num_preemptions_total") > preempted
        assert [answer.text for answer in together] == [answer.text for answer in alone]
        # Each prompt once from disk, and at least one of them again after its preemption.
        assert engine.metric("kvtier_chunks_loaded_total") > sum(a.prompt_tokens // CHUNK for a in alone)
        assert engine.tokens("external_kv_transfer") > loaded
        assert metrics.value("kvtier_chunks_load_failed_total") == 0
