"""A small vLLM of our own, written for these tests: the sites of the patches, in the shapes of 0.27 to 0.29."""

from __future__ import annotations

from pathlib import Path

import kvpatches

FILE = kvpatches.get("vllm-52771").file

NEEDED = '''\
"""A stand-in with the sites that the patches look for."""
import logging

logger = logging.getLogger(__name__)


def cdiv(a, b):
    return -(-a // b)


class SchedulerOffloadConfig:
    @classmethod
    def from_spec(cls, spec, vllm_config, groups):
        draft = {
            i   # kept: a comment inside
            for i, g in enumerate(groups)
            if g.is_eagle_group
        }
        speculative = vllm_config.speculative_config.use_eagle()
        if speculative and not draft:
            draft = set(range(len(groups)))   # the fallback
        return cls(draft=draft, names="ü – é")


class RequestOffloadState:
    def storable_chunks(self, group_config, group_state, tokens):
        chunks = tokens // group_config.tokens_per_chunk
        decoding = tokens > self.req.num_prompt_tokens
        if group_config.is_eagle_group and decoding:
            chunks = max(0, chunks - 1)
        allocated = len(group_state.block_ids) // self.config.blocks_per_chunk
        return min(chunks, allocated)


class OffloadingConnectorScheduler:
    def _lookup_complete_chunks(self, status):
        limit = status.req.num_tokens
        seen = set()
        for index, size, window, keys in self.groups:
            unverified = index not in seen
            query = limit
            if unverified and window is not None:
                query = min(limit + size, len(keys) * size)
            hits = self.look(keys, query)
            if unverified:
                hits -= 1
                seen.add(index)
        return hits

    def update_state_after_alloc(self, request, blocks, external):
        status = self.status[request]
        local = status.num_locally_computed_tokens
        cached = local + external
        for size, table in blocks:
            count = cdiv(cached, size)
            assert len(table) >= count
            start = count
            for i, block in enumerate(table[:count]):
                if not block.is_null and block.block_hash is None:
                    start = i
                    break
            assert local <= start * size
            pending = count - start
        return pending

    def _build_store_jobs(self, output):
        for req in output.all:
            if req.status is RequestStatus.FINISHED_ABORTED:
                after = req.num_computed_tokens
            elif req.is_finished():
                after = req.num_tokens
            else:
                after = 0
            self.store(after)
'''

INIT = "raise ImportError('the tool must not import vLLM')\n"


def site(folder: Path, text: str = NEEDED, version: str = "0.29.0", newline: str = "\n") -> Path:
    """A site that holds this source as vLLM's offloading scheduler. Answers with the file."""
    package = folder / "vllm"
    path = folder / FILE
    path.parent.mkdir(parents=True)
    (package / "__init__.py").write_text(INIT, encoding="utf-8")
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n", encoding="utf-8")
    path.write_bytes(text.replace("\n", newline).encode("utf-8"))
    return path
