"""What a start-up log tells while it runs: when the engine is up, and what a failure means."""

from __future__ import annotations

import msgspec

from kvtier.plan.advice import EngineFigures, from_log_text

_UP = "Application startup complete"
_FIGURE_MARKS = ("KV cache size", "Maximum concurrency", "Available KV cache memory", "non-default args")
_FAILURES = {
    "Insufficient space in /dev/shm": "the RAM tier does not fit /dev/shm: remount it larger (`mount -o "
    "remount,size=…G /dev/shm`) or lower --ram-gib",
    "Failed to promote local KV cache specs": "a hybrid model does not run with LMCache's in-process connector: "
    "plan again without it",
    "expandable_segments": "unset expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF",
    "No available memory for the cache blocks": "the weights leave no room for a KV pool: a smaller "
    "--max-model-len, a smaller model, or more devices",
    "is larger than the maximum number of tokens that can be stored": "one context of that length does not fit "
    "the pool: lower --max-model-len",
    "To serve at least one request with the model's max seq len": "one full context does not fit the KV pool: lower "
    "--max-model-len (the line names the longest that fits)",
    "address already in use": "another process has the port: give another one after `--`, such as --port 8001",
    "Too many open files": "raise the limit: ulimit -n 65536",
    "degraded mode": "LMCache could not start its storage and serves without any cache: see the lines above it",
    "No supported cpu connector": "the plugin of lmcache-nvme-backend did not run: is it installed, and does "
    "VLLM_PLUGINS let it?",
}


class Follower(msgspec.Struct):
    """Feed it lines; it keeps what matters."""

    kept: list[str] = []
    up: bool = False
    hints: list[str] = []

    def feed(self, line: str) -> bool:
        """Take one line; True when it is the one that says the engine is up."""
        if any(mark in line for mark in _FIGURE_MARKS):
            self.kept.append(line)
        for mark, hint in _FAILURES.items():
            if mark in line and hint not in self.hints:
                self.hints.append(hint)
        if not self.up and _UP in line:
            self.up = True
            return True
        return False

    @property
    def figures(self) -> EngineFigures:
        return from_log_text("\n".join(self.kept), "start-up log")
