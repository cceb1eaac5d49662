"""What `nvme.codec: zstd` saves and costs, on the KV that a real model computes from a real text.

    python benchmarks/codec.py [--model DIR] [--tokens 2048] [--json FILE]

The KV is taken from transformers, in chunks of 256 tokens as LMCache lays them out ([K and V, layers, tokens, hidden]),
as bf16 and cast to fp16 and fp8. Rates are of one thread's processor time, in bytes of KV: a busy machine does not
change them much. The checksum that every chunk gets anyway is the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from machine import machine
from rich.console import Console
from rich.table import Table
from rows import Row, number, write_json

from kvtier.document import lighthouse_log
from kvtier.model import find_model
from lmcache_nvme_backend.store import codec
from lmcache_nvme_backend.store.format import checksum

CHUNK_TOKENS, ROUNDS, GB = 256, 5, 1e9


def kv_of(checkpoint: Path, tokens: int) -> Any:
    """`[2, layers, tokens, hidden]` in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(checkpoint)(lighthouse_log(200), return_tensors="pt").input_ids[:, :tokens]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.inference_mode():
        layers = model(words, use_cache=True, logits_to_keep=1).past_key_values.layers
    flat = [[part[0].transpose(0, 1).reshape(words.shape[1], -1) for part in (one.keys, one.values)] for one in layers]
    return torch.stack([torch.stack(list(half)) for half in zip(*flat, strict=True)])


def chunks_of(kv: Any) -> list[memoryview]:
    import torch

    whole = kv.shape[2] // CHUNK_TOKENS * CHUNK_TOKENS
    parts = kv[:, :, :whole].split(CHUNK_TOKENS, dim=2)
    return [memoryview(part.contiguous().view(torch.uint8).numpy().tobytes()) for part in parts]


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.thread_time()
    result = call()
    return time.thread_time() - began, result


def measure(chunks: list[memoryview], split: bool) -> tuple[float, float, float, float]:
    """(ratio, GB/s in, GB/s out, GB/s of the checksum), medians over chunks and rounds."""
    rates: list[tuple[float, float, float, float]] = []
    for chunk in chunks * ROUNDS:
        into = memoryview(bytearray(len(chunk)))
        packing, (kind, packed) = cpu_seconds(lambda c=chunk: codec.compress(c, split))
        unpacking, done = cpu_seconds(lambda k=kind, p=packed, i=into: codec.decompress(k, p, i) if k else True)
        if not done or (kind and into != chunk):
            raise RuntimeError("other bytes came back")
        summing, _ = cpu_seconds(lambda c=chunk: checksum(c))
        size = len(chunk) / GB
        rates.append(
            (len(chunk) / len(packed), size / packing, size / unpacking if kind else float("inf"), size / summing)
        )
    ratio, into_rate, out_rate, sums = (median(column) for column in zip(*rates, strict=True))
    return ratio, into_rate, out_rate, sums


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: SmolLM2-135M.")] = None,
    tokens: Annotated[int, typer.Option(min=CHUNK_TOKENS)] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Ratio and rates of the codec on real KV."""
    import torch

    console = Console()
    checkpoint = find_model(model, lambda text: console.print(text, style="dim"))
    kv = kv_of(checkpoint, tokens)
    rows = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.float8_e4m3fn)):
        chunks = chunks_of(kv.to(dtype))
        for codec_name, split in (("zstd", False), ("zstd-split", True)):
            if split and dtype.itemsize != 2:
                continue
            ratio, into_rate, out_rate, sums = measure(chunks, split)
            for operation, value, unit in (
                ("ratio", ratio, "raw/stored"), ("compress", into_rate, "GB/s"), ("decompress", out_rate, "GB/s"),
            ):  # fmt: skip
                peer = value / sums if unit == "GB/s" else None
                rows.append(Row(f"{codec_name}, {name}", operation, len(chunks[0]), value, unit, peer_ratio=peer))
    table = Table(title=f"KV of {checkpoint.name}, {kv.shape[2]} tokens, chunks of {CHUNK_TOKENS}; one thread")
    for column in ("codec, type", "raw / stored", "in GB/s", "out GB/s", "in, of the checksum's rate"):
        table.add_column(column, justify="left" if column.startswith("codec") else "right")
    for i in range(0, len(rows), 3):
        ratio_row, into_row, out_row = rows[i : i + 3]
        table.add_row(
            ratio_row.subject, number(ratio_row.value), number(into_row.value), number(out_row.value),
            number(into_row.peer_ratio),
        )  # fmt: skip
    console.print(table)
    if json_file is not None:
        write_json(json_file, rows, machine(Path.cwd()), model=checkpoint.name)


if __name__ == "__main__":
    typer.run(main)
