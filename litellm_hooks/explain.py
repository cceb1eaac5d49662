"""Works out, for a configuration and a request in files, where the request would go and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from litellm_hooks.errors import ConfigError
from litellm_hooks.settings import SECTION, load_settings

CALLBACK = "litellm_hooks.prefix_affinity.instance"


def _mapping(path: Path, what: str) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(what, f"{path} ({error.strerror})", "a readable file", "Correct the path.") from None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(what, f"{path}: {error}", "YAML or JSON", "Correct the file.") from None
    if not isinstance(found, Mapping):
        raise ConfigError(what, f"{path}: {type(found).__name__}", "a mapping", "Correct the file.")
    return found


def configuration_notes(config: Mapping[str, Any], path: Path) -> list[str]:
    """What about the configuration would keep the hook from working as meant."""
    notes = []
    callbacks = (config.get("litellm_settings") or {}).get("callbacks") or []
    if CALLBACK not in ([callbacks] if isinstance(callbacks, str) else callbacks):
        notes.append(f"litellm_settings.callbacks does not name {CALLBACK}: the proxy would run without the hook")
    shadow = path.resolve().parent.joinpath(*CALLBACK.split(".")[:-1]).with_suffix(".py")
    if shadow.exists() and not shadow.samefile(Path(__file__).with_name("prefix_affinity.py")):
        notes.append(f"{shadow} beside the configuration shadows the installed package: the proxy would run that file")
    for entry in config.get("model_list") or []:
        info = entry.get("model_info") or {}
        if info.get("kv_tier") not in (None, "nvme", "ram", "none"):
            notes.append(
                f"model_info.kv_tier of {entry.get('model_name')}: {info['kv_tier']!r} is none of nvme, ram, none"
            )
    return notes


async def explain(config_path: Path, request_paths: list[Path]) -> list[str]:
    """Lines that say where each request would go, in the order given: earlier ones are remembered, as a worker would.

    Raises ConfigError for a configuration or request that cannot be used.
    """
    config = _mapping(config_path, "--config")
    settings = load_settings(config.get("callback_settings"))
    lines = [f"note: {note}" for note in configuration_notes(config, config_path)]
    changed = {
        name: value
        for name, value in msgspec.to_builtins(settings).items()
        if value != msgspec.structs.fields(type(settings))[list(settings.__struct_fields__).index(name)].default
    }
    lines.append(f"settings: {SECTION} {changed or 'all defaults'}")

    import litellm
    from litellm import Router

    from litellm_hooks.hook import PrefixAffinity

    logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    litellm.suppress_debug_info = True
    hook = PrefixAffinity(
        msgspec.structs.replace(settings, decision_log=None, share_by_redis=False, poll_metrics_s=0.0)
    )
    known = {key: value for key, value in (config.get("router_settings") or {}).items() if not key.startswith("redis")}
    router = Router(model_list=[dict(entry) for entry in config.get("model_list") or []], **known)
    hook._router = router
    try:
        for number, path in enumerate(request_paths):
            lines += await _explain_one(hook, router, path, number)
    finally:
        await hook.close()
    return lines


async def _explain_one(hook: Any, router: Any, path: Path, number: int) -> list[str]:
    from litellm_hooks.eligibility import eligible
    from litellm_hooks.rendezvous import rendezvous_order
    from litellm_hooks.replica import id_of, replica_of

    request = dict(_mapping(path, "--request"))
    group = str(request.pop("model", ""))
    deployments = [d for d in router.get_model_list(model_name=group) or [] if d]
    if not deployments:
        names = ", ".join(sorted(router.get_model_names()))
        raise ConfigError(f"{path}: model", repr(group), names or "a model of the configuration", "Name one of those.")
    call_id = f"explain-{number}"
    messages = request.pop("messages", None)
    if messages is None and "prompt" in request:
        messages = [{"role": "user", "content": request["prompt"]}]
    kwargs = {**request, "litellm_call_id": call_id, "metadata": dict(request.get("metadata") or {})}
    answer = await hook.async_filter_deployments(group, deployments, messages, kwargs)
    affinity = hook.affinity
    call = affinity.calls.get(call_id)
    prefix, decision = call.prefix, call.decision
    lines = ["", f"request: {path}, model {group!r}"]
    size = f"{len(prefix.keys)} prefixes, {prefix.size} characters"
    lines.append(f"prompt: {size}, about {prefix.size / affinity.chars_per_token(group):.0f} tokens")
    choice = eligible(deployments, kwargs, group, prefix.size / (3.0 * affinity.chars_per_token(group)))
    for deployment in deployments:
        why = choice.excluded.get(id_of(deployment))
        lines.append(f"replica: {id_of(deployment)} {'not eligible: ' + why if why else 'eligible'}")
    if prefix.keys:
        weights = {replica.name: w for (_, replica), w in zip(choice.choices, choice.weights)}
        order = [affinity.id_of(name) for name in rendezvous_order(prefix.anchor, weights)]
        lines.append(f"session: {prefix.anchor:016x}, rendezvous order {', '.join(order)}")
    if decision is None:
        lines.append(f"answer: {', '.join(id_of(d) for d in answer)} (LiteLLM picks), because {call.reason}")
        return lines
    chosen = affinity.id_of(decision.chosen)
    known = f"{decision.predicted_tokens:.0f} of {decision.total_tokens:.0f} tokens believed to lie there"
    lines.append(f"answer: {chosen}, because {call.reason}; {known}")
    affinity.left(call, replica_of(answer[0]))
    affinity.ended(call_id)
    return lines
