"""Write a checkpoint that vLLM serves: `python -m kvtier.checkpoint smollm2|random|hybrid FOLDER`.

A process of its own, because torch and transformers are hundreds of MB that the caller should not carry while an
engine runs. The machine's network is never asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.document import QUESTION, lighthouse_log

# A wide initialisation makes attention matter: with the usual 0.02 the answer hardly depends on the prompt's beginning,
# and wrong KV would go unseen.
_RANDOM_INIT_STD = 0.15
# So small that the demo's document comes to about 5,000 tokens although the tokenizer is trained on it.
_RANDOM_VOCAB = 480


def smollm2(folder: Path, gguf: Path) -> None:
    """Convert SmolLM2-135M-Instruct from GGUF to an ordinary bf16 checkpoint (269 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def byte_level_tokenizer(folder: Path) -> None:
    """A tokenizer of `_RANDOM_VOCAB` tokens, for models whose weights are random anyway."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_RANDOM_VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([lighthouse_log(8) + QUESTION], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def random_llama(folder: Path) -> None:
    """A Llama of four layers with random weights (some 5 MB, 2 KiB of KV a token) and a byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    byte_level_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_RANDOM_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=_RANDOM_INIT_STD,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def random_hybrid(folder: Path) -> None:
    """A Qwen3-Next of four layers with random weights (some 6 MB), one with attention and three gated delta nets, whose
    state of fixed size is kept beside the KV; and a byte-level tokenizer."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    byte_level_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=_RANDOM_VOCAB,
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
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=_RANDOM_INIT_STD,
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    kind, target = sys.argv[1], Path(sys.argv[2])
    if kind == "random":
        random_llama(target)
    elif kind == "hybrid":
        random_hybrid(target)
    else:
        smollm2(target, Path(sys.argv[3]))
