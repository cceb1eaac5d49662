"""What the commands share: options, where facts come from, JSON output, and how a user's mistake is shown."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from kvtier import facts as facts_file
from kvtier.detect import box
from kvtier.facts import Facts, Memory
from kvtier.observe import snapshot
from kvtier.plan import advice, engine_rates, wishes
from kvtier.plan.advice import EngineFigures
from kvtier.plan.wishes import Wishes
from lmcache_nvme_backend.errors import ConfigError

EXIT_FAILED, EXIT_USAGE = 1, 2

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

FactsOption = Annotated[
    Path | None, typer.Option("--facts", help="A facts file of `kvtier detect --json`, instead of looking.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="discrete or unified: your word goes before everything found.")
]


def facts_from(file: Path | None, memory: str | None = None) -> Facts:
    """Facts from a file, or from looking at this box; the user's word on its memory goes first."""
    says = memory_kind(memory)
    if file is None:
        return box.look(user_says=says)
    found = facts_file.load(file)
    return box.overrule(found, says) if says else found


def memory_kind(text: str | None) -> Memory | None:
    """``discrete`` or ``unified``."""
    if text is None:
        return None
    if text not in (Memory.DISCRETE, Memory.UNIFIED):
        raise ConfigError("--memory", repr(text), "discrete, unified", "Say which of the two, or leave it out.")
    return Memory(text)


def wishes_from(options: dict[str, Any], log: str | None = None) -> Wishes:
    """Wishes from command-line texts; every size and count is checked here."""
    method, tokens = wishes.speculation(options.get("spec"))
    return Wishes(
        ram_gib=wishes.size("--ram-gib", options.get("ram_gib")),
        nvme=options.get("nvme"),
        nvme_gib=wishes.size("--nvme-gib", options.get("nvme_gib")),
        max_model_len=wishes.number("--max-model-len", options.get("max_model_len")),
        kv_cache_dtype=options.get("kv_cache_dtype") or "auto",
        tp=wishes.number("--tp", options.get("tp")),
        pp=wishes.number("--pp", options.get("pp")) or 1,
        nodes=wishes.nodes(options.get("nodes")),
        spec=method,
        spec_tokens=tokens,
        lora=bool(options.get("lora")),
        target_vllm=wishes.version(options.get("target_vllm")),
        engine=options.get("engine") or "vllm",
        typical_tokens=wishes.number("--typical-tokens", options.get("typical_tokens")),
        prefill_tokens_per_s=wishes.rate("--prefill-tps", options.get("prefill_tps"), "tokens a second"),
        link_gbps=wishes.rate("--link-gbps", options.get("link_gbps"), "GB a second"),
        nvme_gbps=wishes.rate("--nvme-gbps", options.get("nvme_gbps"), "GB a second"),
        engine_rates=engine_rates.read(Path(rates)) if (rates := options.get("engine_rates")) else None,
        figures=_figures(log),
        lmcache_file=options.get("lmcache_file") or Wishes().lmcache_file,
    )


def _figures(log: str | None) -> EngineFigures | None:
    """What an engine says of its pool: from its start-up log, or from the engine itself where `log` is its address."""
    if log is None:
        return None
    if log.startswith(("http://", "https://")):
        try:
            return msgspec.structs.replace(snapshot.scrape(log).figures, source=log)
        except ConfigError as error:
            raise ConfigError(
                "--log",
                error.found,
                "the address of a running vLLM, or its start-up log",
                "Start the engine, or give the log's file.",
            ) from error
    return advice.from_log(Path(log))


def print_json(value: Any) -> None:
    """A struct as indented JSON on standard output, and nothing else there."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show a ConfigError as one message and end with exit code 2; as JSON where --json was asked for."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            if kwargs.get("as_json") or kwargs.get("json_to") == "-":
                sys.stdout.write(
                    json.dumps(
                        {
                            "error": {
                                "setting": error.setting,
                                "found": error.found,
                                "allowed": error.allowed,
                                "todo": error.todo,
                            }
                        },
                        indent=2,
                    )
                    + "\n"
                )
            errors.print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(EXIT_USAGE) from error

    return wrapped
