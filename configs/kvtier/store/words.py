"""A namespace in words."""

from __future__ import annotations

from typing import Any

from kvtier.units import GIB, KIB, MIB
from lmcache_nvme_backend.store.survey import Part, Recency

_SHORT = 12


def title(part: Part) -> str:
    """What a person calls it: the model's name, else its identity."""
    if part.model_name:
        return part.model_name
    model = (part.facts or {}).get("model")
    return _shortened(model) if isinstance(model, str) else "unknown: no namespace.json"


def details(part: Part) -> str:
    """The facts that tell it from another one of the same model."""
    facts = part.facts
    if facts is None:
        return ""
    if "inference_engine" in facts:
        return _vllm_details(facts)
    found = [_text(facts, "kv_dtype", "{}"), _text(facts, "cache_dtype", "cache {}", unless="auto")]
    found += [_text(facts, "quantization", "{}", unless="None")]
    if "rank" in facts:
        found.append(f"rank {facts['rank']} of {facts.get('world_size', '?')}")
    found.append(_text(facts, "chunk_tokens", "{} tokens a chunk"))
    found += [
        _text(facts, "layout", "layout {}"),
        _text(facts, "vllm", "vLLM {}"),
        _text(facts, "lmcache", "LMCache {}"),
    ]
    found.append(_text(facts, "hash", "hash {}"))
    model = facts.get("model")
    if isinstance(model, str) and part.model_name:
        found.append(_shortened(model))
    return ", ".join(text for text in found if text)


def _vllm_details(facts: dict[str, Any]) -> str:
    found = [_text(facts, "dtype", "{}"), _text(facts, "tp_size", "tp {}"), _text(facts, "pp_size", "pp {}", unless=1)]
    for tokens, blocks in (("tokens_per_hash", "blocks_per_file"), ("hash_block_size", "gpu_blocks_per_file")):
        found += [_text(facts, tokens, "{} tokens a block"), _text(facts, blocks, "{} blocks a file")]
    return ", ".join(text for text in found if text)


def _text(facts: dict[str, Any], key: str, form: str, unless: Any = None) -> str:
    value = facts.get(key)
    return "" if value is None or value == unless else form.format(value)


def _shortened(identity: str) -> str:
    """``weights:0123456789ab…``: enough to tell two apart."""
    kind, colon, digest = identity.partition(":")
    return f"{kind}:{digest[:_SHORT]}…" if colon and len(digest) > _SHORT and kind == "weights" else identity


def size(count: int) -> str:
    """Bytes in the largest binary unit that they fill."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def ago(then_ns: int | None, now_ns: int) -> str:
    """How long ago: ``5 min ago``."""
    return "never" if then_ns is None else f"{span((now_ns - then_ns) / 1e9)} ago"


def span(seconds: float) -> str:
    """Seconds in one unit that a person would choose."""
    seconds = max(0.0, seconds)
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def recency(classes: list[Recency]) -> str:
    """What share of the bytes was last used within each time: ``1 h 20%, 7 d 80%``."""
    total = sum(class_.nbytes for class_ in classes)
    if not total:
        return ""
    found = []
    for class_ in classes:
        if class_.nbytes:
            name = "longer ago" if class_.within_s is None else _class(class_.within_s)
            found.append(f"{name} {class_.nbytes / total:.0%}")
    return ", ".join(found)


def _class(seconds: int) -> str:
    return f"{seconds // 86_400} d" if seconds >= 86_400 else f"{seconds // 3600} h"


def state(part: Part) -> str:
    """Open, stale or neither."""
    if part.open_by:
        return f"open in process {', '.join(map(str, part.open_by))}"
    if part.stale:
        return f"stale: {part.stale}"
    return "not known" if part.open_by is None else "not open"
