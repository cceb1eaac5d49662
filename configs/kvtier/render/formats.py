"""One plan, six formats. Every function is pure: plan (and rank) in, text out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from kvtier.plan.result import Plan
from kvtier.units import GIB
from lmcache_nvme_backend.errors import ConfigError

_PORT = 8000
_SHM_SLACK_GIB = 1
"""Beside the RAM tier: message queues and communication buffers."""
_RELEASED = re.compile(r"\d+\.\d+\.\d+$")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What one host runs: of a plan for several, one rank's part."""

    name: str
    args: list[str]
    env: dict[str, str]
    lmcache: dict[str, Any] | None
    nvme: str | None
    """The directory the tier needs, as the engine sees it."""


def render(plan: Plan, form: str, rank: int = 0) -> str:
    """The plan in one format, for one rank of a plan for several hosts.

    Raises:
        ConfigError: an unknown format, a rank that the plan lacks, or a plan that is refused.
    """
    if form not in FORMATS:
        raise ConfigError("--format", repr(form), ", ".join(FORMATS), "Take one of these.")
    if not plan.serves:
        reasons = "; ".join(reason.sentence for reason in plan.reasons if reason.effect == "refused")
        raise ConfigError("MODEL", "a plan that is refused", "a plan that can be started", reasons)
    return FORMATS[form](plan, host(plan, rank))


def host(plan: Plan, rank: int = 0) -> Host:
    """The part of a plan that one host runs."""
    paths = [tier.path for tier in plan.tiers if tier.path]
    if not plan.nodes:
        if rank:
            raise ConfigError("--rank", str(rank), "0", "This plan is for one host.")
        return Host(
            name="kvtier",
            args=plan.vllm_args,
            env=plan.env,
            lmcache=plan.lmcache_config,
            nvme=paths[0] if paths else None,
        )
    if not 0 <= rank < len(plan.nodes):
        raise ConfigError("--rank", str(rank), f"0 to {len(plan.nodes) - 1}", "Give a rank of the plan.")
    node = plan.nodes[rank]
    return Host(
        name=node.name,
        args=node.vllm_args,
        env=node.env,
        lmcache=node.lmcache_config,
        nvme=paths[rank] if paths else None,
    )


def as_args(plan: Plan, host: Host) -> str:
    """The command line, ready for a shell."""
    return shlex.join([*plan.command, *host.args]) + "\n"


def as_yaml(plan: Plan, host: Host) -> str:
    """The LMCache configuration; one comment where the plan has none."""
    if host.lmcache is None:
        return f"# {plan.decision.value}: this plan uses no LMCache.\n{{}}\n"
    return _dump(host.lmcache)


def as_env(plan: Plan, host: Host) -> str:
    """The environment, one variable a line, as shells and `docker --env-file` read it."""
    return "".join(f"{name}={value}\n" for name, value in host.env.items())


def as_compose(plan: Plan, host: Host) -> str:
    """A docker compose service. The LMCache configuration lies inside it."""
    service: dict[str, Any] = {
        "image": _image(plan),
        "command": _inside(plan, host),
        "entrypoint": _entry(plan),
        "environment": host.env,
        "ports": [f"{_PORT}:{_PORT}"],
        "ulimits": {"memlock": -1, "nofile": {"soft": 65536, "hard": 65536}},
        "volumes": [f"{name}:{name}" for name in _mounts(plan, host)],
        "stop_grace_period": "60s",
        "restart": "on-failure",
    }
    if plan.nodes:
        service |= {"network_mode": "host"}
        del service["ports"]
    # The host's /dev/shm: its size is known to the plan, and leaked maps can be swept from outside.
    service["ipc"] = "host"
    service |= _devices_compose(plan)
    document: dict[str, Any] = {"services": {host.name: service}}
    if host.lmcache is not None:
        service["configs"] = [{"source": "lmcache", "target": host.env["LMCACHE_CONFIG_FILE"]}]
        document["configs"] = {"lmcache": {"content": as_yaml(plan, host)}}
    # Compose reads $ in every value as a variable; the image's is meant.
    return _dump(_dollars(document, keep=service["image"]))


def as_systemd(plan: Plan, host: Host) -> str:
    """A systemd unit; the LMCache configuration is a file of its own (--format yaml)."""
    wants = f"RequiresMountsFor={_systemd_value(host.nvme)}\n" if host.nvme else ""
    variables = "".join(f"Environment={_systemd_value(f'{name}={value}')}\n" for name, value in host.env.items())
    prepare = f"ExecStartPre=/usr/bin/mkdir -p {_systemd_word(host.nvme)}\n" if host.nvme else ""
    model = " ".join(_systemd_escape(plan.model).split())
    command = " ".join(_systemd_word(word) for word in ["/usr/bin/env", *plan.command, *host.args])
    return (
        f"[Unit]\nDescription=vLLM, {plan.decision.value} behind the KV pool ({model})\n"
        f"After=network-online.target\nWants=network-online.target\n{wants}\n"
        f"[Service]\n{variables}{prepare}ExecStart={command}\n"
        "LimitNOFILE=65536\nLimitMEMLOCK=infinity\nUMask=0077\nKillMode=mixed\nTimeoutStopSec=60\nRestart=on-failure\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def as_k8s(plan: Plan, host: Host) -> str:
    """A Kubernetes pod, with a ConfigMap before it where the plan uses LMCache. /dev/shm is a memory volume of the
    tier's size."""
    shm = next((tier.bytes for tier in plan.tiers if tier.name == "ram"), 0)
    limit = f"{shm // GIB + _SHM_SLACK_GIB}Gi"
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if host.nvme:
        volumes.append({"name": "kv", "hostPath": {"path": host.nvme, "type": "DirectoryOrCreate"}})
        mounts.append({"name": "kv", "mountPath": host.nvme})
    if plan.model.startswith("/"):
        volumes.append({"name": "model", "hostPath": {"path": plan.model, "type": "Directory"}})
        mounts.append({"name": "model", "mountPath": plan.model, "readOnly": True})
    documents: list[dict[str, Any]] = []
    name = re.sub(r"[^a-z0-9-]+", "-", f"vllm-{host.name}".lower()).strip("-")
    if host.lmcache is not None:
        path = host.env["LMCACHE_CONFIG_FILE"]
        folder, _, file = path.rpartition("/")
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{name}-lmcache"},
                "data": {file: as_yaml(plan, host)},
            }
        )
        volumes.append({"name": "lmcache", "configMap": {"name": f"{name}-lmcache"}})
        mounts.append({"name": "lmcache", "mountPath": folder, "readOnly": True})
    container: dict[str, Any] = {
        "name": "vllm",
        "image": _plain_image(plan),
        "command": [_kubernetes(word) for word in plan.command],
        "args": [_kubernetes(word) for word in host.args],
        "env": [{"name": key, "value": value} for key, value in host.env.items()],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}, "periodSeconds": 5, "failureThreshold": 240},
        "volumeMounts": mounts,
    }
    if limits := _devices_k8s(plan):
        container["resources"] = {"limits": limits}
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": 60, "containers": [container], "volumes": volumes}
    if plan.nodes:
        spec |= {"hostNetwork": True, "nodeSelector": {"kubernetes.io/hostname": host.name}}
    documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    return "---\n".join(_dump(document) for document in documents)


FORMATS: dict[str, Callable[[Plan, Host], str]] = {
    "args": as_args,
    "yaml": as_yaml,
    "env": as_env,
    "compose": as_compose,
    "systemd": as_systemd,
    "k8s": as_k8s,
}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as literal blocks, which a person can read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dump(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000)


def _image(plan: Plan) -> str:
    """Upstream's image where it holds everything the plan needs; else a variable that the user has to set."""
    if plan.vendor == "nvidia" and not plan.needs_package and _RELEASED.match(plan.target_vllm):
        return f"vllm/vllm-openai:v{plan.target_vllm}"
    holds = "vLLM " + plan.target_vllm
    if plan.needs_package:
        holds += ", lmcache and lmcache-nvme-backend" if plan.lmcache_config else " and lmcache-nvme-backend"
    return f"${{VLLM_IMAGE:?an image with {holds}}}"


def _plain_image(plan: Plan) -> str:
    """As `_image`, for files without variables: a name that says what is missing."""
    image = _image(plan)
    return (
        image
        if not image.startswith("$")
        else "set-me/"
        + re.sub(r"[^a-z0-9.]+", "-", image.removeprefix("${VLLM_IMAGE:?an image with ").rstrip("}").lower())
    )


def _entry(plan: Plan) -> list[str]:
    return plan.command[:-1] if plan.command[:2] == ["vllm", "serve"] else plan.command[:3]


def _inside(plan: Plan, host: Host) -> list[str]:
    return [*plan.command[len(_entry(plan)) :], *host.args]


def _mounts(plan: Plan, host: Host) -> list[str]:
    found = [host.nvme] if host.nvme else []
    return [*found, *([plan.model] if plan.model.startswith("/") else [])]


def _devices_compose(plan: Plan) -> dict[str, Any]:
    if plan.vendor == "nvidia":
        return {
            "deploy": {
                "resources": {
                    "reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
                }
            }
        }
    if plan.vendor == "amd":
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video", "render"]}
    return {"devices": ["/dev/dri"], "group_add": ["video", "render"]} if plan.vendor == "intel" else {}


def _devices_k8s(plan: Plan) -> dict[str, Any]:
    names = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/xe"}
    if plan.vendor not in names:
        return {}
    here = max(plan.world_size // max(len(plan.nodes), 1), 1)
    return {names[plan.vendor]: here}


def _dollars(value: Any, keep: str) -> Any:
    if isinstance(value, str):
        return value if value == keep else value.replace("$", "$$")
    if isinstance(value, list):
        return [_dollars(entry, keep) for entry in value]
    return {key: _dollars(entry, keep) for key, entry in value.items()} if isinstance(value, dict) else value


def _systemd_escape(text: str) -> str:
    return text.replace("%", "%%")


def _systemd_word(word: str) -> str:
    """One argument of a command as systemd reads it: as a value, and $, which it expands there alone, doubled."""
    return _systemd_value(word.replace("$", "$$"))


def _systemd_value(word: str) -> str:
    """One word of a unit's setting: % doubled, quoted with C escapes where needed."""
    escaped = _systemd_escape(word)
    if re.fullmatch(r"[A-Za-z0-9_./:=@,+%$-]+", escaped):
        return escaped
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        escaped = escaped.replace(plain, written)
    return f'"{escaped}"'


def _kubernetes(word: str) -> str:
    return word.replace("$(", "$$(")
