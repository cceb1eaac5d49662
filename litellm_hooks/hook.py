"""LiteLLM's side of the hook: a CustomLogger that asks `Affinity` and lets no failure of its own reach a request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from litellm_hooks import metrics, seams, stream_failover, tenants
from litellm_hooks.affinity import Affinity
from litellm_hooks.calls import Call
from litellm_hooks.decision_log import DecisionLog
from litellm_hooks.eligibility import eligible, failed_in, metadata_of
from litellm_hooks.errors import ConfigError
from litellm_hooks.replica import Deployment, Replica, replica_of
from litellm_hooks.replica_poll import ReplicaPoll
from litellm_hooks.settings import Settings
from litellm_hooks.shared_state import SharedState
from litellm_hooks.usage import usage_of

log = logging.getLogger("litellm_hooks")

_GONE = ("connection error", "cannot connect", "connection refused", "connect call failed", "server disconnected",
         "connection reset")  # fmt: skip


class PrefixAffinity(CustomLogger):  # type: ignore[misc]
    """Sends every session to the replica where its prefix lies. One instance a worker process.

    `router` is for use without the proxy: the litellm.Router whose callback this is.
    """

    def __init__(self, settings: Settings, router: Any | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.affinity = Affinity(settings)
        self.log = _open_log(settings)
        self._router = router
        self._shared: SharedState | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._anonymous = 0
        self._warned: set[str] = set()

    # Before the call

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: Any, call_type: Any) -> Any:
        """Tenants and the billing line: what has to be in the request before anything looks at it.

        A failure here is not swallowed where tenants are isolated: an answer from another tenant's cache would be
        worse than none.
        """
        if not isinstance(data, dict):
            return data
        if self.settings.isolate_by != "none" and tenants.cannot_be_marked(call_type):
            seams.refuse_vllm(self._router or seams.running_router(), data.get("model"))
        if not tenants.is_generation(call_type):
            return data
        tenants.isolate(data, call_type, tenants.tenant_of(self.settings.isolate_by, user_api_key_dict))
        if self.settings.strip_billing_header:
            tenants.strip_billing(data)
        stream_failover.add(data, self._router or seams.running_router())
        return data

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Any]:
        """One deployment where the choice is clear, several where it is not, all of them where anything goes wrong."""
        began = time.perf_counter()
        try:
            if not isinstance(healthy_deployments, list) or not healthy_deployments:
                return healthy_deployments
            self._start()
            answer = await self._filter(model, healthy_deployments, messages, request_kwargs or {}, began)
        except Exception as error:
            self._trouble("filter", error)
            return healthy_deployments
        metrics.SECONDS.observe(time.perf_counter() - began)
        return answer or healthy_deployments

    async def _filter(
        self, group: str, deployments: list[Any], messages: Any, request: Mapping[str, Any], began: float
    ) -> list[Any] | None:
        affinity = self.affinity
        call_id = request.get("litellm_call_id")
        if not isinstance(call_id, str):
            # Without the proxy the router makes the call id later. A trace may go on over several calls.
            self._anonymous += 1
            call_id = str(request.get("litellm_trace_id") or f"anonymous-{self._anonymous}")
        call = affinity.calls.begin(call_id, group, again=bool(failed_in(request)))
        router = self._router or seams.running_router()
        allowed = await seams.tagged(router, group, deployments, request)
        if allowed is None:
            self._unclear(call, "tags")
            return None
        prefix = affinity.prefix(call, messages, request, _is_raw_prompt(messages, request))
        least = prefix.size / (3.0 * affinity.chars_per_token(group))
        choice = eligible(allowed, request, group, least, call.failed)
        kept = [(*pair, weight) for pair, weight in zip(choice.choices, choice.weights)]
        replicas = [replica for _, replica in choice.choices]
        self._check_tiers(replicas)
        affinity.know(replicas)
        pinned = self._response_pin(call, kept, request, began)
        if pinned is not None:
            return [pinned]
        if not prefix.keys:
            self._unclear(call, "no_prefix")
            return [deployment for deployment, _, _ in kept]
        while kept:
            decision = affinity.decide(call, [replica for _, replica, _ in kept], [weight for _, _, weight in kept])
            place = next(index for index, (_, replica, _) in enumerate(kept) if replica.name == decision.chosen)
            deployment = kept[place][0]
            if await seams.passes_checks(router, group, deployment, messages, request, prefix.size):
                reason = "failover" if call.failed else decision.reason
                call.reason = reason
                metrics.DECISIONS.labels(reason).inc()
                if decision.reason in ("moved", "spill", "bound"):
                    metrics.SPILLS.inc()
                self._log_decision(call, len(kept), began)
                return [deployment]
            del kept[place]
        affinity.unplaced(call)
        self._unclear(call, "checks")
        return None

    def _unclear(self, call: Call, reason: str) -> None:
        call.decision, call.reason = None, reason
        metrics.DECISIONS.labels(reason).inc()

    def _response_pin(
        self, call: Call, kept: list[tuple[Deployment, Replica, float]], request: Mapping[str, Any], began: float
    ) -> Deployment | None:
        """The replica that holds the response a /v1/responses request goes on from: only there it is stored."""
        previous = request.get("previous_response_id")
        if not previous:
            return None
        model_id, origin = seams.response_origin(previous)
        home = self.affinity.response_home(str(previous)) or self.affinity.response_home(str(origin))
        for deployment, replica, _ in kept:
            if replica.id == model_id or (model_id is None and replica.name == home):
                self.affinity.pinned(call, replica, "response")
                metrics.DECISIONS.labels("response").inc()
                self._log_decision(call, len(kept), began)
                return deployment
        return None

    # The call leaves, begins to answer, ends

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """The pick is known: the lease is taken, and the request made fit for its deployment."""
        replica = None
        try:
            replica = self._replica_in(kwargs)
            call = self.affinity.calls.of(kwargs)
            if call is not None and replica is not None:
                self.affinity.left(call, replica)
        except Exception as error:
            self._trouble("leave", error)
        isolated = self.settings.isolate_by != "none"
        if isolated and tenants.cannot_be_marked(call_type) and tenants.is_vllm(kwargs):
            raise seams.refusal(kwargs.get("model"))  # a passthrough has not come by async_pre_call_hook
        return tenants.adapt_to_deployment(kwargs, call_type, replica.lora if replica else None, isolated)

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Sees a stream's first token and its end, also where the client goes away and no other hook fires."""
        call_id = str(request_data.get("litellm_call_id"))
        begun = done = False
        attempts, first = 0, response
        try:
            while True:
                try:
                    async for chunk in response:
                        if not begun:
                            begun = True
                            self.affinity.first_token(call_id)
                        yield chunk
                    break
                except Exception as error:
                    attempts += 1
                    call = self.affinity.calls.get(call_id)
                    if call is not None and call.deployment_id and not begun:
                        self._attempt_failed(call, call.deployment_id, error)
                    router = self._router or seams.running_router()
                    response = None if begun else await stream_failover.again(request_data, router, attempts)
                    if response is None:
                        raise
            done = True
        finally:
            self.affinity.ended(call_id, aborted=not done)
            if response is not first:
                await stream_failover.close(response)

    async def async_post_call_success_deployment_hook(self, request_data: Any, response: Any, call_type: Any) -> Any:
        """An answer that does not stream is complete."""
        try:
            call = self.affinity.calls.of(request_data)
            if call is not None and not hasattr(response, "__aiter__"):
                self.affinity.ended(call.call_id)
        except Exception as error:
            self._trouble("success", error)
        return None

    async def async_post_call_failure_deployment_hook(
        self, request_data: Any, exception: Exception, call_type: Any, fallback_depth: int | None = None
    ) -> None:
        """An attempt failed; LiteLLM will ask for another deployment if it still may."""
        try:
            call = self.affinity.calls.of(request_data)
            replica = self._replica_in(request_data)
            if call is not None and replica is not None:
                self._attempt_failed(call, replica.id, exception)
        except Exception as error:
            self._trouble("failure", error)

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Exception, user_api_key_dict: Any, *_: Any, **__: Any
    ) -> None:
        """The request failed for good."""
        try:
            self.affinity.ended(str(request_data.get("litellm_call_id")), aborted=True)
        except Exception as error:
            self._trouble("failure", error)

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """The answer is complete and its usage known, streams included."""
        try:
            params = kwargs.get("litellm_params") or {}
            call = self.affinity.calls.of(kwargs, params)
            replica = self._replica_in(params)
            if call is None:
                return
            self.affinity.ended(call.call_id)
            usage = usage_of(response_obj)
            if replica is None or usage is None:
                return
            self.affinity.measured(call, replica, usage)
            _, origin = seams.response_origin(getattr(response_obj, "id", None))
            if origin is not None and str(kwargs.get("call_type")) in ("responses", "aresponses"):
                self.affinity.remember_response(origin, call, replica)
            self._write(
                event="answer",
                call=call.call_id,
                replica=replica.id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached,
                aborted=call.aborted,
            )
        except Exception as error:
            self._trouble("answer", error)

    async def async_post_call_response_headers_hook(
        self, data: Any, user_api_key_dict: Any, response: Any, request_headers: Any = None, *_: Any, **__: Any
    ) -> dict[str, str] | None:
        """`x-kv-replica` and `x-kv-reason`, where they are wanted."""
        if not self.settings.response_headers:
            return None
        call = self.affinity.calls.get(data.get("litellm_call_id"))
        if call is None or not call.deployment_id:
            return None
        return {"x-kv-replica": call.deployment_id, "x-kv-reason": call.reason}

    # Behind the requests' backs

    def _start(self) -> None:
        """Starts the background tasks on the proxy's loop, at the first request: there is none at import."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        settings, affinity = self.settings, self.affinity
        runs = [self._publish()]
        if self.log is not None:
            runs.append(self.log.run())
        if settings.poll_metrics_s > 0:
            poll = ReplicaPoll(settings.poll_metrics_s, settings.poll_timeout_s, affinity.servers, affinity.polled)
            runs.append(poll.run())
        if settings.share_by_redis:
            self._shared = SharedState(self._redis, affinity.own_load, affinity.heard_places, affinity.heard_load)
            affinity.on_place = self._shared.placed
            runs.append(self._shared.run())
        self._tasks = [loop.create_task(run) for run in runs]

    def _redis(self) -> Any | None:
        cache = seams.redis_cache(self._router or seams.running_router())
        return cache.init_async_client() if cache is not None else None

    async def _publish(self) -> None:
        while True:
            self.affinity.hears(seams.one_of_several(), self._shared is not None and self._shared.alive)
            self.affinity.publish()
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Ends the background tasks, the log written out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._loop = [], None
        if self.log is not None:
            await self.log.flush()

    # Small things

    def _attempt_failed(self, call: Call, deployment_id: str, error: Exception) -> None:
        text = str(error).lower()
        self.affinity.failed(call, deployment_id, server_gone=any(sign in text for sign in _GONE))
        self._write(event="failed", call=call.call_id, replica=deployment_id, error=type(error).__name__)

    def _replica_in(self, kwargs: Mapping[str, Any]) -> Replica | None:
        """The replica a call was sent to, from what LiteLLM's router wrote into it."""
        info = kwargs.get("model_info")
        if not isinstance(info, Mapping) or not info.get("id"):
            info = metadata_of(kwargs).get("model_info")
        if not isinstance(info, Mapping) or not info.get("id"):
            return None
        ident = str(info["id"])
        known = self.affinity.replicas.get(ident)
        if known is None:
            known = replica_of({"model_info": info, "litellm_params": {"api_base": kwargs.get("api_base")}})
            self.affinity.know([known])
        return known

    def _check_tiers(self, replicas: list[Replica]) -> None:
        for replica in replicas:
            if replica.tier_found is not None and replica.tier_found != replica.tier:
                found = f"model_info.kv_tier of {replica.id}: found {replica.tier_found!r}"
                self._warn(f"{found}; allowed: nvme, ram, none; counted as none")

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            log.warning("prefix affinity: %s", text)

    def _trouble(self, where: str, error: Exception) -> None:
        metrics.ERRORS.labels(where).inc()
        self._warn(f"{where}: {type(error).__name__}: {error}; the request went on without a decision")

    def _log_decision(self, call: Call, eligible_count: int, began: float) -> None:
        if self.log is None:
            return
        decision = call.decision
        self._write(
            event="decision",
            call=call.call_id,
            group=call.group,
            session=f"{call.prefix.anchor:016x}",
            replica=self.affinity.id_of(call.replica),
            reason=call.reason,
            home=self.affinity.id_of(decision.home) if decision else None,
            predicted_tokens=round(decision.predicted_tokens) if decision else None,
            prompt_tokens=round(call.prefix.size / self.affinity.chars_per_token(call.group)),
            eligible=eligible_count,
            failed=sorted(call.failed),
            took_us=round(1e6 * (time.perf_counter() - began)),
        )

    def _write(self, **fields: Any) -> None:
        if self.log is not None:
            self.log.put(time=round(time.time(), 3), worker=os.getpid(), **fields)


def _open_log(settings: Settings) -> DecisionLog | None:
    if settings.decision_log is None:
        return None
    path = Path(settings.decision_log)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            "decision_log", f"{path} ({error.strerror})", "a file that can be written", "Correct it, or leave it out."
        ) from None
    return DecisionLog(path, int(settings.decision_log_mb * 1e6), settings.decision_log_files)


def _is_raw_prompt(messages: Any, request: Mapping[str, Any]) -> bool:
    """A /v1/completions request shows the hook its prompt as one user message; its body tells them apart."""
    if not isinstance(messages, list) or len(messages) != 1:
        return False
    sent = request.get("proxy_server_request")
    body = sent.get("body") if isinstance(sent, Mapping) else None
    return "prompt" in request or (isinstance(body, Mapping) and "prompt" in body and "messages" not in body)
