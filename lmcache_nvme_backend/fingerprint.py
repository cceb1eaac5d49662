"""A model's identity from its weights, in seconds for hundreds of gigabytes.

KV is a function of the weights, so two checkpoints that happen to lie at the same path one after the other must not
share chunks. Reading every byte would take minutes; this reads the configuration whole and samples every tensor.

What it sees: any change of ``config.json``, of the index, of a file's size, of a tensor's name, dtype, shape or place,
and any change of a tensor that touches one of its samples: ``SAMPLES`` windows of ``WINDOW`` bytes, spread evenly from
its first byte to its last. Training, merging or quantizing moves practically every value and is always seen. What it
cannot see is an edit of single values by hand that lie between the samples; whoever does that sets
``nvme.model_fingerprint`` to a name of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

SAMPLES = 8  # windows a tensor: begin, end, and six between
WINDOW = 64  # bytes a window; 32 values in 16 bit
STRIDE = 1 << 20  # other weight formats (GGUF, .bin) have no cheap tensor table: a window every MiB
MAX_HEADER = 256 << 20  # a safetensors header beyond this is not one

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
# Files besides the weights that change what the engine computes from the same tokens.
_CONFIGURATION = ("config.json", "quantize_config.json", "hf_quant_config.json", "adapter_config.json")


def model_fingerprint(directory: Path) -> str:
    """The fingerprint of a checkpoint directory (or of one weights file), as 32 hex digits.

    Raises:
        OSError: something could not be read.
        ValueError: there are no weights in the directory.
    """
    digest = hashlib.blake2b(b"kv-fingerprint-1", digest_size=16)
    files = [directory] if directory.is_file() else sorted(p for p in directory.iterdir() if p.is_file())
    weights = [p for p in files if p.suffix in _WEIGHTS]
    if not weights:
        raise ValueError(f"no weights ({', '.join(_WEIGHTS)}) in {directory}")
    for path in files:
        if path.name in _CONFIGURATION or path.name.endswith(".index.json"):
            _part(digest, b"file", path.name.encode(), path.read_bytes())
    for path in weights:
        with path.open("rb", buffering=0) as f:
            fd, size = f.fileno(), os.fstat(f.fileno()).st_size
            _part(digest, b"weights", path.name.encode(), size.to_bytes(8, "little"))
            header = _safetensors_header(fd, size) if path.suffix == ".safetensors" else None
            if header is not None:
                digest.update(hashlib.blake2b(header[1], digest_size=16).digest())
            for offset, length in _tensor_windows(*header) if header else _stride_windows(size):
                digest.update(os.pread(fd, length, offset))
    return digest.hexdigest()


def _part(digest: Any, *fields: bytes) -> None:
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)


def _safetensors_header(fd: int, size: int) -> tuple[int, bytes] | None:
    """Where the tensors begin and the header's JSON; ``None`` where the file is not what its name says.

    Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors (safetensors' own specification).
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        return None
    return 8 + length, os.pread(fd, length, 8)


def _tensor_windows(start: int, header: bytes) -> Iterator[tuple[int, int]]:
    try:
        table = msgspec.json.decode(header)
        spans = [entry["data_offsets"] for name, entry in table.items() if name != "__metadata__"]
        spans = sorted((int(begin), int(end)) for begin, end in spans)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        raise ValueError("a safetensors header cannot be read") from None
    for begin, end in spans:
        length = end - begin
        if length <= SAMPLES * WINDOW:
            yield start + begin, length
            continue
        for i in range(SAMPLES):
            yield start + begin + (length - WINDOW) * i // (SAMPLES - 1), WINDOW


def _stride_windows(size: int) -> Iterator[tuple[int, int]]:
    # A GGUF's metadata and tensor table lie at its head: read that part whole.
    yield 0, min(size, STRIDE)
    for offset in range(STRIDE, size, STRIDE):
        yield offset, min(WINDOW, size - offset)
    yield max(0, size - WINDOW), min(WINDOW, size)


def identify_model(model: str, revision: str | None = None) -> str:
    """The identity of what an engine calls ``model``: a directory, a weights file, or a hub name in the local cache.

    A hub snapshot is immutable, so its resolved commit is its identity.

    Raises:
        ValueError: the name leads to nothing on this machine.
        OSError: something could not be read.
    """
    path = Path(model)
    if path.exists():
        return f"weights:{model_fingerprint(path.resolve())}"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise ValueError(f"{model!r} is not a path, and huggingface_hub is not installed") from None
    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise ValueError(f"{model!r} is neither a path nor in the local hub cache")
    return f"hub:{model}@{Path(cached).parent.name}"
