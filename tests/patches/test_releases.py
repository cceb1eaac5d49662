"""Every release: what the tool says of it, and what a real scheduler does before and after."""

from __future__ import annotations

import py_compile
from pathlib import Path
from typing import Any

import pytest
from rooms import release

import kvpatches
from kvpatches.catalog import get
from kvpatches.rewrite import rewrite
from tests import wheels

AFFECTED = [release(v) for v in wheels.NEEDED]
MENDED_AT_FINISH = [release(v) for v in wheels.NEEDED if v not in ("0.24.0", "0.25.1")]
IDS = {"vllm-52771", "vllm-52807", "vllm-52923"}


def states(site: Path) -> dict[str, str]:
    return {row.id: str(row.state) for row in kvpatches.status(site)}


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return wheels.small_site(request.getfixturevalue("version"), tmp_path / "site")


def without_requirement(site: Path) -> None:
    """vllm-52771 alone, as somebody would carry it who does not know what it needs."""
    path = site / wheels.SCHEDULER
    path.write_bytes(rewrite(path.read_bytes(), [(get("vllm-52771"), None)]))


@pytest.mark.parametrize("version", AFFECTED, scope="module")
def test_an_affected_release_needs_every_patch_and_takes_it_back_and_forth(version: str, site: Path) -> None:
    """Needed; applied, twice the same; compiled; reverted to the byte; applied again to the same bytes."""
    path = site / wheels.SCHEDULER
    original = path.read_bytes()
    assert states(site) == dict.fromkeys(IDS, "needed")

    [outcome] = kvpatches.apply(site=site)
    patched = path.read_bytes()
    assert outcome.changed and set(outcome.patches) == IDS
    assert states(site) == dict.fromkeys(IDS, "applied")
    py_compile.compile(str(path), cfile=str(site / "out.pyc"), doraise=True)
    [again] = kvpatches.apply(site=site)
    assert not again.changed and path.read_bytes() == patched

    kvpatches.revert(site=site)
    assert path.read_bytes() == original and states(site) == dict.fromkeys(IDS, "needed")
    kvpatches.apply(site=site)
    assert path.read_bytes() == patched


@pytest.mark.parametrize("version", [release(v) for v in wheels.NOT_NEEDED], scope="module")
def test_a_release_before_or_after_is_left_alone(version: str, site: Path) -> None:
    """Not affected before 0.24, fixed upstream from 0.30 on, and not a byte changes."""
    path = site / wheels.SCHEDULER
    original = path.read_bytes()
    expected = "not-affected" if version == "0.23.0" else "fixed-upstream"
    assert states(site) == dict.fromkeys(IDS, expected)
    assert not any(o.changed for o in kvpatches.apply(site=site, options=["finished-tail"]))
    assert path.read_bytes() == original and not (path.parent / ".kvpatches").exists()


@pytest.mark.parametrize("version", AFFECTED, scope="module")
def test_a_stored_prompt_is_served_with_mtp_once_patched(version: str, site: Path, rooms: Any) -> None:
    """40,000 tokens on one attention and three GDN groups: nothing with MTP before, every chunk that has a state after.

    With MTP the scheduler keeps no recurrent state at the prompt's last full chunk (it backs off one block), so that
    one chunk is computed, here as in the releases that have the fix.
    """
    room = rooms(version)
    plain = room.run("serve", None, mtp=False)["result"]
    assert plain["groups"] == ["FullAttentionSpec", "MambaSpec", "MambaSpec", "MambaSpec"]
    assert plain["served"] == plain["full_chunks"]
    before = room.run("serve", None)["result"]
    assert before["served"] == 0 and sum(before["stored"]) > 0
    kvpatches.apply(["vllm-52771"], site)
    after = room.run("serve", site)["result"]
    assert after["served"] == after["full_chunks"] - after["block"]


@pytest.mark.parametrize("version", [release(v) for v in wheels.NOT_NEEDED], scope="module")
def test_the_releases_that_need_nothing_serve_the_same(version: str, rooms: Any) -> None:
    """The peer of the test above: what an unpatched 0.23, 0.30, 0.31 and 0.32 serve with MTP."""
    result = rooms(version).run("serve", None)["result"]
    assert result["served"] == result["full_chunks"] - result["block"]


@pytest.mark.parametrize("version", AFFECTED, scope="module")
def test_a_partial_hit_kills_the_engine_without_52807_and_not_with_it(version: str, site: Path, rooms: Any) -> None:
    """The head of the prompt in the GPU pool and the rest in the tier: an assertion before, only the rest loaded after.

    0.24 to 0.26 get there by themselves; for 0.27 to 0.29 the reported block table is handed to the real method.
    """
    room = rooms(version)
    stray = version not in ("0.24.0", "0.25.1", "0.26.0")
    without_requirement(site)
    broken = room.run("partial_hit", site, stray=stray)
    assert (broken.get("error"), broken.get("function")) == ("AssertionError", "update_state_after_alloc")

    mended = wheels.small_site(version, site.parent / "mended")
    [outcome] = kvpatches.apply(["vllm-52771"], mended)
    assert set(outcome.patches) == {"vllm-52771", "vllm-52807"}
    hit = room.run("partial_hit", mended, stray=stray)["result"]
    attention, block = hit["attention"], hit["block"]
    assert hit["local"] > 0 and hit["served"] > 0 and hit["into_stray"] == []
    assert hit["first_loaded"][attention] == hit["local"] // block
    assert hit["loaded_blocks"][attention] == hit["served"] // block


@pytest.mark.parametrize("version", AFFECTED, scope="module")
def test_a_chunk_without_its_key_waits_for_it(version: str, site: Path, rooms: Any) -> None:
    """A hash that is a step late is an assertion before 52923; after it the chunk is stored when the hash is there."""
    room = rooms(version)
    broken = room.run("late_key", None)
    assert (broken.get("error"), broken.get("function")) == ("AssertionError", "_build_store_jobs")
    kvpatches.apply(["vllm-52923"], site)
    assert room.run("late_key", site)["result"] == {"first": [0], "then": [0, 1]}


@pytest.mark.parametrize("version", [release("0.26.0")], scope="module")
def test_an_abort_neither_kills_the_engine_nor_stores_what_was_not_computed(
    version: str, site: Path, rooms: Any
) -> None:
    """0.26 dies of an abort, queued or running. With 52923 it stores nothing, or the computed chunks and no more."""
    room = rooms(version)
    for scenario in ("abort_queued", "abort_running"):
        assert room.run(scenario, None).get("error") == "AssertionError"
    kvpatches.apply(["vllm-52923"], site)
    assert not any(room.run("abort_queued", site)["result"]["stored"])
    running = room.run("abort_running", site)["result"]
    assert running["stored"] == list(range(running["computed_chunks"]))


@pytest.mark.parametrize("version", MENDED_AT_FINISH, scope="module")
def test_the_finished_tail_option_stores_the_written_tail_and_nothing_unwritten(
    version: str, site: Path, rooms: Any
) -> None:
    """With `offload_prompt_only: false`: a chunk that ends in the last sampled token is stored before and not after;
    a draft group's last written chunk is not stored before and is after. Without the option neither changes."""
    room = rooms(version)

    def chunks(where: Path | None) -> tuple[int, int]:
        unwritten = room.run("finish", where, extra=0, draft_marked=False)["result"]["stored"]
        tail = room.run("finish", where, extra=3, draft_marked=True)["result"]["stored"]
        return len(unwritten), len(tail)

    assert chunks(None) == (5, 4)
    kvpatches.apply(["vllm-52771"], site)
    assert chunks(site) == (5, 4)
    kvpatches.apply(["vllm-52771"], site, ["finished-tail"])
    assert chunks(site) == (4, 5)
