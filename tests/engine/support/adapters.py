"""LoRA adapters with random weights, strong enough to change what a model says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A PEFT adapter on the query, key and value projections of a Llama in `model`."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in ("q_proj", hidden), ("k_proj", kv), ("v_proj", kv):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            weights[f"{key}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
