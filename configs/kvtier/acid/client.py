"""Requests to the engine under test: prompts of token ids, streamed, timed at the client."""

from __future__ import annotations

import random
import time

import httpx
import msgspec

from kvtier.observe.snapshot import root_of
from kvtier.stream import events
from lmcache_nvme_backend.errors import ConfigError

_FIRST_ID, _IDS = 20, 220
"""Ids that every vocabulary has and that are no special token in any common one (those lie at the very start or the
end)."""
_READ_TIMEOUT_S = 1800.0


class Answer(msgspec.Struct, frozen=True):
    """One completed request."""

    first_token_s: float
    total_s: float
    prompt_tokens: int


class Target:
    """The engine at a URL. Threads may share one."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """Look the engine up.

        Raises:
            ConfigError: nothing answers there.
        """
        self.url = root_of(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(trust_env=False, headers=headers, timeout=httpx.Timeout(30.0, read=_READ_TIMEOUT_S))
        try:
            served = self.http.get(f"{self.url}/v1/models").raise_for_status().json()["data"][0]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise ConfigError(
                "--url", f"{url} ({error})", "the root of a running vLLM", "Start the engine, or give its address."
            ) from error
        self.model: str = model or served["id"]
        self.context: int | None = served.get("max_model_len")

    def version(self) -> str:
        """vLLM's version, or an empty text."""
        try:
            return str(self.http.get(f"{self.url}/version").json()["version"])
        except (httpx.HTTPError, LookupError, ValueError):
            return ""

    def ask(self, prompt: list[int], max_tokens: int = 1) -> Answer:
        """Complete a prompt of token ids.

        Raises:
            RuntimeError: the engine answered with an error, or its stream broke off.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, tokens = time.perf_counter(), None, 0
        try:
            with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"{response.status_code}: {response.read().decode(errors='replace')[:500]}")
                for event in events(response):
                    if "error" in event:
                        raise RuntimeError(str(event["error"])[:500])
                    if event.get("choices") and first is None:
                        first = time.perf_counter() - began
                    tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
        except httpx.HTTPError as error:
            raise RuntimeError(str(error) or type(error).__name__) from error
        if first is None:
            raise RuntimeError("the stream ended without a token")
        return Answer(first, time.perf_counter() - began, tokens)

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait for /health after a restart.

        Raises:
            ConfigError: it did not come up in time.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if self.http.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise ConfigError(
            "--restart-command",
            f"no healthy engine at {self.url} within {timeout_s:.0f} s",
            "a command after which the engine is up",
            "See the engine's log.",
        )


def document(tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed's document shares a prefix with."""
    chosen = random.Random(seed)
    return [_FIRST_ID + chosen.randrange(_IDS) for _ in range(tokens)]
