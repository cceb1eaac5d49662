"""A tiny random Qwen3-Next: one full-attention layer in four, the others gated delta nets with a recurrent state."""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 480


def write_hybrid(folder: Path) -> None:
    """A checkpoint of some 6 MB without a tokenizer. Runs in a process of its own, since torch is large."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        # Wide, so that what a model says depends on all of its prompt.
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    write_hybrid(Path(sys.argv[1]))
