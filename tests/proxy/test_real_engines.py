"""The proxy in front of two real vLLM engines on the CPU.

The engines run under this interpreter, or under the one that $KVTIER_ENGINE_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, ModelServer, Process, example, running_proxy, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINE_PYTHON = os.environ.get("KVTIER_ENGINE_PYTHON", sys.executable)
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}<|assistant|>"


def engine_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "configs"), str(ROOT)])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def model() -> str:
    code = "from kvtier.model import find_model; print(find_model('random', lambda text: None))"
    found = subprocess.run(
        [ENGINE_PYTHON, "-c", code], env=engine_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    if found.returncode:
        pytest.skip(f"no engine here: {found.stderr.strip().splitlines()[-1][:200]}")
    return found.stdout.strip().splitlines()[-1]


class Engine(ModelServer):
    """A real vLLM in the place of a model server."""

    def __init__(self, name: str, folder: Path, model: str) -> None:
        super().__init__(name, folder)
        self.model = model

    def start(self) -> None:
        template = self.folder / "template.jinja"
        template.write_text(TEMPLATE)
        served = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
        command = [
            *(ENGINE_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--served-model-name", served, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--dtype", "float32"),
            *("--max-model-len", "4096", "--max-num-batched-tokens", "1024", "--chat-template", str(template)),
        ]
        self.process = Process(command, self.folder / f"{self.name}.log", env=engine_environment(), cwd=self.folder)

    def ready(self) -> None:
        def up() -> bool:
            assert self.process is not None
            assert self.process.child.poll() is None, self.process.log.read_text(errors="replace")[-2000:]
            import httpx

            try:
                return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(up, seconds=240, every=0.5)


@pytest.fixture(scope="module")
def engines(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    found = [Engine(f"engine{number}", folder, model) for number in range(2)]
    try:
        for engine in found:
            engine.start()
        for engine in found:
            engine.ready()
        yield found
    finally:
        for engine in found:
            if engine.process is not None:
                engine.process.end()


def turn(session: str, turns: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{session} {i} " + "a few words more " * 25} for i in range(turns)]


def test_sessions_hit_the_caches_of_real_engines(engines: list[Engine], tmp_path: Path) -> None:
    """Every later turn of every session is answered from a real engine's prefix cache, both engines are used, the
    engines accept salt and tag, and another tenant with the same prompt hits nothing."""
    (tmp_path / "proxy").mkdir()
    folder = tmp_path / "proxy"
    (folder / "tenant_auth.py").write_text(
        "from litellm.proxy._types import UserAPIKeyAuth\n\n"
        "async def user(request, api_key):\n    return UserAPIKeyAuth(api_key=api_key)\n"
    )
    config = example("coder", list(engines), isolate_by="key", poll_metrics_s=0.5)
    config["general_settings"]["custom_auth"] = "tenant_auth.user"
    with ExitStack() as stack:
        proxy = stack.enter_context(running_proxy(folder, config))
        homes: dict[str, str] = {}
        for turns in (1, 3, 5):
            for number in range(6):
                name = f"session{number}"
                answer = proxy.ask(turn(name, turns), max_tokens=4)
                assert answer.status_code == 200, answer.text[:500]
                assert homes.setdefault(name, answer.headers["x-kv-replica"]) == answer.headers["x-kv-replica"]
                usage = answer.json()["usage"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                if turns > 1:
                    assert cached > 0.3 * usage["prompt_tokens"], json.dumps(usage)
        assert set(homes.values()) == {"coder-1", "coder-2"}
        proxy.client.headers["Authorization"] = "Bearer sk-other-tenant"
        usage = proxy.ask(turn("session0", 5), max_tokens=4).json()["usage"]
        assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for path, body in (
            ("/v1/completions", {"prompt": "one two three"}),
            ("/v1/responses", {"input": "one two three", "max_output_tokens": 4}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}),
        ):
            answer = proxy.client.post(path, json={"model": "coder", **body})
            assert answer.status_code == 200, (path, answer.text[:500])
