"""The options of every command that plans, in one place: they are texts here, checked in `common.wishes_from`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvtier.commands.common import FactsOption, MemoryOption, facts_from, wishes_from
from kvtier.facts import Facts
from kvtier.plan.wishes import Wishes

Text = str | None


def _options(
    facts: FactsOption = None,
    memory: MemoryOption = None,
    ram_gib: Annotated[Text, typer.Option(help="RAM tier, GiB over all ranks.")] = None,
    nvme: Annotated[Text, typer.Option(help="Directory of the NVMe tier.")] = None,
    nvme_gib: Annotated[Text, typer.Option(help="NVMe tier, GiB.")] = None,
    max_model_len: Annotated[Text, typer.Option(help="Longest context, tokens.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8, bfloat16, …")] = "auto",
    tp: Annotated[Text, typer.Option(help="Tensor parallel ranks.")] = None,
    pp: Annotated[Text, typer.Option(help="Pipeline stages.")] = None,
    nodes: Annotated[
        Text, typer.Option(help="Hosts that serve together: spark-0=ADDRESS@INTERFACE,spark-1=…; the first is rank 0.")
    ] = None,
    spec: Annotated[
        Text, typer.Option(help="Speculative decoding: mtp, eagle, eagle3, ngram or draft_model, with :TOKENS.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="LoRA adapters will be served.")] = False,
    target_vllm: Annotated[Text, typer.Option(help="Plan for this release instead of the installed one.")] = None,
    engine: Annotated[str, typer.Option(help="vllm.")] = "vllm",
    log: Annotated[
        Text, typer.Option(help="vLLM's start-up log, or a running engine's URL: its pool decides seats and steps.")
    ] = None,
    typical_tokens: Annotated[Text, typer.Option(help="Length of a usual request, for the advice on seats.")] = None,
    prefill_tps: Annotated[Text, typer.Option(help="Prefill rate, tokens/s, for the estimate.")] = None,
    link_gbps: Annotated[Text, typer.Option(help="Host to device, GB/s; goes before what was measured.")] = None,
    nvme_gbps: Annotated[Text, typer.Option(help="NVMe read, GB/s; goes before what was measured.")] = None,
    engine_rates: Annotated[
        Text, typer.Option(help="What benchmarks/engine_ttft.py --json wrote: decides which hits are too short.")
    ] = None,
    lmcache_file: Annotated[Text, typer.Option(help="Where the LMCache configuration will lie.")] = None,
) -> None:
    """Never called: its signature is the list of options."""


_PARAMETERS = inspect.signature(_options, eval_str=True).parameters


def with_planning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the planning options; it gets `facts` and `wishes` instead of them."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in _PARAMETERS}
        box, wished = planning_input(options)
        return command(**kwargs, facts=box, wishes=wished)

    kept = [parameter for parameter in own if parameter.name not in ("facts", "wishes")]
    added = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in _PARAMETERS.values()]
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept] + added
    )
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added)}
    return wrapped


def planning_input(options: dict[str, Any]) -> tuple[Facts, Wishes]:
    """Facts and wishes from the options' values."""
    return facts_from(options["facts"], options["memory"]), wishes_from(options, options["log"])
