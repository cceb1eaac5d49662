"""`NvmeTier`'s entry in vLLM's command line, as the front process sees it: no vLLM is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_nvme_backend.doors import command_line, vllm_plugin
from lmcache_nvme_backend.doors.hybrid_prefix import CacheGroup
from lmcache_nvme_backend.doors.native.settings import names_this_door
from lmcache_nvme_backend.doors.tier import opening
from lmcache_nvme_backend.doors.tier.requests import Origin, RequestPrefix, split_key
from lmcache_nvme_backend.errors import ConfigError


def arguments(**entry: Any) -> list[str]:
    tier = {"type": "NvmeTier", "module_path": "lmcache_nvme_backend", **entry}
    extra = {"secondary_tiers": [{"type": "fs", "root_dir": "/x"}, tier]}
    return ["vllm", "--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]


def test_the_entry_is_found_among_others_in_either_way_of_writing(tmp_path: Path) -> None:
    """As two arguments or as one, with underscores; and what is no JSON is vLLM's to refuse."""
    words = arguments(root_dir=str(tmp_path), quota_gib=1)
    [entry] = command_line.secondary_tiers("NvmeTier", words)
    assert entry["root_dir"] == str(tmp_path)
    assert command_line.secondary_tiers("NvmeTier", ["vllm", f"--kv_transfer_config={words[2]}"]) == [entry]
    for text in (
        "{",
        "[]",
        '{"kv_connector_extra_config": 3}',
        '{"kv_connector_extra_config": {"secondary_tiers": 3}}',
    ):
        assert command_line.secondary_tiers("NvmeTier", ["vllm", "--kv-transfer-config", text]) == []
        assert not names_this_door(command_line.transfer_config(["vllm", "--kv-transfer-config", text]))
    assert command_line.secondary_tiers("NvmeTier", ["vllm", "--kv-transfer-config"]) == []


WRONG = {
    "quota": ({"quota_gib": 0}, "quota_gib: found 0"),
    "directory": ({"root_dir": "/nowhere/at/all"}, "root_dir: found /nowhere/at/all"),
    "spelling": ({"io_thread": 3}, "Did you mean io_threads?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_ends_the_start_in_the_front_process(tmp_path: Path, case: str) -> None:
    """One sentence, and an exit status; before torch or vLLM are imported."""
    given, text = WRONG[case]
    words = arguments(**{"root_dir": str(tmp_path), "quota_gib": 1, **given})
    code = f"import sys; sys.argv = {words!r}\nfrom lmcache_nvme_backend.doors import vllm_plugin\n"
    code += (
        "try:\n    vllm_plugin.register()\nfinally:\n    print([m for m in ('torch', 'vllm') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and text in done.stderr and done.stdout.strip() == "[]"
    assert "Traceback" not in done.stderr


def test_an_entry_that_may_degrade_is_left_to_the_tier(tmp_path: Path) -> None:
    """It says why itself, and shows it in a metric."""
    entry = command_line.secondary_tiers("NvmeTier", arguments(root_dir="/nowhere", on_init_error="degrade"))[0]
    vllm_plugin.check_tier(entry)
    with pytest.raises(ConfigError):
        opening.check_entry(entry)


@pytest.mark.parametrize(
    ("version", "refused"), [("0.28.1", True), ("0.29.0", False), ("0.32.0+cpu", False), ("dev", False)]
)
def test_a_vllm_from_before_such_tiers_is_refused_by_name(version: str, refused: bool) -> None:
    """What cannot be told is tried."""
    if refused:
        with pytest.raises(ConfigError, match=version):
            opening.check_version(version)
    else:
        opening.check_version(version)


GROUPS = (CacheGroup(0, 2), CacheGroup(1, 2, window=1))


def key(block_hash: bytes, group: int) -> bytes:
    return block_hash + group.to_bytes(4, "big")


def request(chunks: int, lora: Any = None) -> Any:
    return SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(chunks)], lora_request=lora)


def test_a_chunk_is_placed_by_its_hash_also_as_the_request_grows() -> None:
    """vLLM names a chunk by the last of its hashes; more of them come with every token."""
    growing = request(4)
    prefix = RequestPrefix(Origin(growing), GROUPS)
    head = prefix.place(key(growing.block_hashes[1], 0))
    second = prefix.place(key(growing.block_hashes[3], 0))
    assert head.parent is None and second.parent == head.key and second.depth > head.depth
    assert prefix.end_of(b"?" * 32) is None
    growing.block_hashes.append(b"\x09" * 32)
    assert prefix.end_of(b"\x09" * 32) == 5
    assert split_key(key(b"\x09" * 32, 7)) == (b"\x09" * 32, 7)


def test_groups_and_adapters_have_keys_of_their_own(tmp_path: Path) -> None:
    """The same hash in another group, or computed with an adapter, is another chunk."""
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(tmp_path))
    plain, adapted = (RequestPrefix(Origin(request(2, by)), GROUPS) for by in (None, lora))
    assert plain.resolved and not adapted.resolved
    adapted.resolve()
    names = {prefix.key(key(b"h" * 32, group)) for prefix in (plain, adapted) for group in (0, 1)}
    assert len(names) == 4


def test_nothing_is_stored_behind_attention_that_was_not() -> None:
    """The first gap counts."""
    prefix = RequestPrefix(Origin(request(8)), GROUPS)
    assert not prefix.is_cut(8)
    prefix.cut(6)
    prefix.cut(4)
    prefix.cut(7)
    assert [prefix.is_cut(end) for end in (2, 4, 5, 6)] == [False, False, True, True]
