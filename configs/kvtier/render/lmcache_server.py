"""The plan through LMCache's multi-process server: its command with NvmeL2Adapter, and vLLM's that uses it."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import unquote, urlsplit

from kvtier.facts import Memory
from kvtier.plan.result import Decision, Plan
from kvtier.units import GIB
from lmcache_nvme_backend.doors.mp.params import check_behind
from lmcache_nvme_backend.errors import ConfigError

HOST, PORT = "127.0.0.1", 5555
_REDIS_PORT = 6379
# LMCache evicts from its memory above this share, so a hit has to fit below it.
_WATERMARK = 0.8
_ARGUMENT = "--kv-transfer-config"
_POOL = "--kv-cache-memory-bytes"
# Settings of LMCache's adapters that may stand in the server's environment, which others on the host cannot see.
_IN_ENVIRONMENT = {
    "resp": {"username": "LMCACHE_RESP_USERNAME", "password": "LMCACHE_RESP_PASSWORD"},
    "aerospike": {"username": "LMCACHE_AEROSPIKE_USERNAME", "password": "LMCACHE_AEROSPIKE_PASSWORD"},
    "s3": {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"},
}
_CONTEXT_STEP = 256


def render(plan: Plan, behind: str | None = None) -> str:
    """A shell script of two commands: the server, and the engine that uses it.

    Args:
        behind: a store that several hosts share: ``redis://[user:password@]host[:port]`` (``valkey://`` is the same),
            or the JSON object of one of LMCache's L2 adapters.

    Raises:
        ConfigError: a plan without this tier or for several hosts, a store that cannot be meant, or an L1 that leaves
            the KV pool less than one context.
    """
    if plan.decision is not Decision.LMCACHE_NVME or plan.lmcache_config is None:
        raise ConfigError(
            "--door", f"mp, for a plan that is {plan.decision.value}", "mp for a plan of lmcache-nvme",
            "Leave --door out: this plan's tier does not go through LMCache.",
        )  # fmt: skip
    if plan.nodes:
        raise ConfigError(
            "--door", "mp, for a plan of several hosts", "mp for one host", "Leave --nodes out: a host at a time."
        )
    spec, secrets = parse_behind(behind)
    pool = l1_gib(plan)
    server = ["lmcache", "server", "--host", HOST, "--port", str(PORT), "--l1-size-gb", str(pool)]
    server += ["--eviction-policy", "LRU", "--l2-adapter", _json(adapter(plan, spec))]
    if plan.memory == Memory.CPU.value:
        server += ["--supported-transfer-mode", "auto"]
    env = {name: value for name, value in plan.env.items() if name != "LMCACHE_CONFIG_FILE"}
    engine = [*plan.command, *_with_connector(_pool_beside(plan, pool))]
    shared = " The engine's KV pool is as much smaller: device and host share one memory." if _POOL in engine else ""
    return (
        f"# LMCache's server. A hit is in its memory all at once, hence {pool} GiB for {plan.max_model_len} tokens."
        f"{shared}\n"
        f"{_command({'LMCACHE_TRACK_USAGE': 'false', **secrets}, server)}\n"
        "# vLLM, once the server answers. kvtier.identity proves to the server whose KV it is.\n"
        f"{_command(env, engine)}\n"
    )


def l1_gib(plan: Plan) -> int:
    """Host memory of LMCache's L1: what a request loads is in it all at once."""
    longest = _stored(plan) * plan.max_model_len
    return max(1, -(-int(longest / _WATERMARK) // GIB))


def _stored(plan: Plan) -> int:
    """Bytes of a token: the model's layers and the draft's."""
    return plan.kv_bytes_per_token + plan.draft_kv_bytes_per_token


def _pool_beside(plan: Plan, l1: int) -> list[str]:
    """vLLM's arguments. Where device and host share one memory, the plan has fixed the KV pool without L1's GiB."""
    args = [*plan.vllm_args]
    pool = next((tier for tier in plan.tiers if tier.name == "pool"), None)
    if _POOL not in args or pool is None:
        return args
    at = args.index(_POOL) + 1
    planned = int(args[at])
    left = planned - l1 * GIB
    if left * pool.tokens < plan.max_model_len * planned:
        # One context in the pool, and the same in L1, whose size is in whole GiB.
        each = planned / pool.tokens + _stored(plan) / _WATERMARK
        fits = max(int((planned - GIB) / each), 0) // _CONTEXT_STEP * _CONTEXT_STEP
        raise ConfigError(
            "--max-model-len",
            f"{plan.max_model_len} with --door mp, whose L1 of {l1} GiB comes out of a KV pool of {planned // GIB} GiB",
            f"at most {fits}",
            "Shorten it, or leave --door out: the plan's own door takes no such memory.",
        )
    args[at] = str(left)
    return args


def adapter(plan: Plan, behind: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's --l2-adapter: the tier of the plan, with its settings under the door's names."""
    assert plan.lmcache_config is not None
    extra = plan.lmcache_config["extra_config"]
    params = {name.removeprefix("nvme."): value for name, value in extra.items() if name.startswith("nvme.")}
    params = {"root_dir": params.pop("path"), "quota_gib": params.pop("quota_gib"), **params}
    if behind is None:
        params.pop("staging_mib", None)
    else:
        params |= {"behind": behind}
    return {
        "type": "plugin",
        "module_path": "lmcache_nvme_backend",
        "class_name": "NvmeL2Adapter",
        "adapter_params": params,
    }


def connector() -> dict[str, Any]:
    """vLLM's --kv-transfer-config."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": PORT,
            "kvtier.identity": "auto",
        },
    }


def parse_behind(text: str | None) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The adapter's JSON object for what the user wrote, and what goes into the server's environment instead: its
    command line is visible to everybody on the host.

    Raises:
        ConfigError: neither a Redis URL nor a JSON object with a type.
    """
    if text is None:
        return None, {}
    if text.lstrip().startswith("{"):
        try:
            spec = check_behind(json.loads(text))
        except ConfigError as e:
            raise ConfigError(f"--{e.setting}", e.found, e.allowed, e.todo) from None
        except ValueError as e:
            raise _refuse(text, f"It is no JSON: {e}.") from None
        return _without_secrets(spec)
    try:
        url = urlsplit(text)
        port = url.port or _REDIS_PORT
    except ValueError as e:
        raise _refuse(text, f"{e}.") from None
    if url.scheme not in ("redis", "valkey") or not url.hostname:
        tls = url.scheme in ("rediss", "valkeys")
        raise _refuse(text, "LMCache's Redis client knows no TLS." if tls else "Such as redis://kv.example:6379.")
    if url.path.strip("/") not in ("", "0") or url.query:
        raise _refuse(text, "LMCache's Redis client takes database 0 and no options: leave them out.")
    named = {"username": url.username, "password": url.password}
    given = {name: unquote(value) for name, value in named.items() if value}
    return _without_secrets({"type": "resp", "host": url.hostname, "port": port, **given})


def _without_secrets(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What of an adapter's settings LMCache reads from the environment as well goes there."""
    names = _IN_ENVIRONMENT.get(spec["type"], {})
    rest = {key: value for key, value in spec.items() if key not in names}
    return rest, {names[key]: str(value) for key, value in spec.items() if key in names and value}


def _refuse(text: str, todo: str) -> ConfigError:
    return ConfigError("--behind", repr(text), "redis://[user:password@]host[:port], or an L2 adapter's JSON", todo)


def _with_connector(args: list[str]) -> list[str]:
    at = args.index(_ARGUMENT)
    return [*args[: at + 1], _json(connector()), *args[at + 2 :]]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _command(env: dict[str, str], words: list[str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(words)])
