"""What is remembered of each call between the hooks that see it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from litellm_hooks.placement import Decision
from litellm_hooks.prefix import NO_PREFIX, Prefix

MAX_CALLS = 20_000


class Call(msgspec.Struct):
    """One client request, over all its attempts."""

    call_id: str
    group: str
    prefix: Prefix = NO_PREFIX
    decision: Decision | None = None
    reason: str = ""
    replica: str = ""
    """Name of the replica of the current attempt, empty before one is known."""
    deployment_id: str = ""
    failed: set[str] = msgspec.field(default_factory=set)
    """Ids of the deployments that failed in this call."""
    left: bool = False
    """The current attempt has been sent."""
    aborted: bool = False
    ended: bool = False
    """It is over. What comes under its id from now on is another request: a client may choose the id."""


class Calls:
    """The latest calls by id. Older ones are forgotten: their leases end by time."""

    def __init__(self, limit: int = MAX_CALLS) -> None:
        self.limit = limit
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, call_id: str | None) -> Call | None:
        return self._calls.get(call_id) if call_id is not None else None

    def of(self, *holders: Mapping[str, Any]) -> Call | None:
        """The call of a hook's arguments: by LiteLLM's call id, else by the trace id the filter knew it by."""
        for holder in holders:
            for key in ("litellm_call_id", "litellm_trace_id"):
                found = self._calls.get(str(holder.get(key)))
                if found is not None:
                    return found
        return None

    def begin(self, call_id: str, group: str, again: bool) -> Call:
        """The call's record, for an attempt after one that failed: by LiteLLM's record (`again`), or by this one's. A
        fallback to another group starts a new one with the same failures, and so does what is no such attempt, with
        none."""
        call = self._calls.get(call_id)
        if call is not None and not again and (call.ended or not call.failed):
            call = None
        if call is None or call.group != group:
            failed = call.failed if call is not None else set()
            call = self._calls[call_id] = Call(call_id, group, failed=failed)
            self._calls.move_to_end(call_id)
            while len(self._calls) > self.limit:
                self._calls.popitem(last=False)
        return call
