"""What the tool says of code, and that it never edits what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_vllm import NEEDED, site

import kvpatches
from kvpatches import State


def states(folder: Path) -> dict[str, State]:
    return {row.id: row.state for row in kvpatches.status(folder)}


def detail(folder: Path, patch: str) -> str:
    return next(row.detail for row in kvpatches.status(folder) if row.id == patch)


def test_needed_code_is_needed_and_becomes_applied_with_its_revision(tmp_path: Path) -> None:
    """Needed becomes applied, and the status names the revision of the patch that made the change."""
    site(tmp_path)
    assert set(states(tmp_path).values()) == {State.NEEDED}
    kvpatches.apply(site=tmp_path)
    rows = kvpatches.status(tmp_path)
    assert {r.state for r in rows} == {State.APPLIED}
    assert {r.revision for r in rows} == {kvpatches.get(r.id).revision for r in rows}


def test_every_byte_outside_the_changes_stays(tmp_path: Path) -> None:
    """Lines that are not part of a change are in the patched file as they were, in their order."""
    path = site(tmp_path)
    kvpatches.apply(site=tmp_path, options=["finished-tail"])
    patched = path.read_text(encoding="utf-8").splitlines()
    rest = iter(patched)
    gone = [
        line for line in NEEDED.splitlines() if line not in rest and (rest := iter(patched)) and line not in patched
    ]
    assert [line.strip() for line in gone] == [
        "draft = set(range(len(groups)))   # the fallback",
        "if group_config.is_eagle_group and decoding:",
        "return min(chunks, allocated)",
        "if unverified and window is not None:",
        "for i, block in enumerate(table[:count]):",
        "assert local <= start * size",
        "after = req.num_tokens",
    ]


def test_windows_line_endings_are_kept(tmp_path: Path) -> None:
    """A CRLF file is patched with CRLF throughout, and reverted to the byte."""
    path = site(tmp_path, newline="\r\n")
    original = path.read_bytes()
    kvpatches.apply(site=tmp_path)
    patched = path.read_bytes()
    assert set(states(tmp_path).values()) == {State.APPLIED}
    assert patched.count(b"\n") == patched.count(b"\r\n") > original.count(b"\r\n")
    kvpatches.revert(site=tmp_path)
    assert path.read_bytes() == original


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("draft = set(range(len(groups)))", "draft = set(range(1, len(groups)))"),
        ("if unverified and window is not None:", "if unverified or window is not None:"),
        ("                hits -= 1\n", "                hits -= 2\n"),
        ("            if not block.is_null and", "            if block.is_null and"),
        ("assert local <= start * size", "assert local < start * size"),
        ("return min(chunks, allocated)", "return max(chunks, allocated)"),
        ("def _lookup_complete_chunks", "def _lookup_chunks"),
        (
            "            count = cdiv(cached, size)\n",
            "            computed_blocks = 1\n            count = cdiv(cached, size)\n",
        ),
    ],
)
def test_code_that_differs_at_a_site_is_unknown_and_nothing_is_written(tmp_path: Path, old: str, new: str) -> None:
    """Any difference that matters is unknown code: exit 3, the function is named, the file is as it was."""
    assert old in NEEDED
    path = site(tmp_path, NEEDED.replace(old, new))
    before = path.read_bytes()
    unknown = [row for row in kvpatches.status(tmp_path) if row.state is State.UNKNOWN_CODE]
    assert unknown and "expected" in unknown[0].detail
    with pytest.raises(kvpatches.UnknownCode) as refused:
        kvpatches.apply(site=tmp_path)
    assert refused.value.exit_code == 3 and any(
        f in str(refused.value) for f in ("from_spec", "_lookup", "alloc", "storable")
    )
    assert path.read_bytes() == before and not (path.parent / ".kvpatches").exists()


def test_a_statement_that_shares_its_line_is_not_edited(tmp_path: Path) -> None:
    """Where a byte-exact edit would have to take a line apart, apply refuses and changes nothing."""
    text = NEEDED.replace("blocks_per_chunk\n        return min", "blocks_per_chunk; return min")
    assert text != NEEDED
    path = site(tmp_path, text)
    with pytest.raises(kvpatches.UnknownCode, match="shares its line"):
        kvpatches.apply(site=tmp_path)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "text", ["def broken(:\n", NEEDED[:900], "\0", "# -*- coding: latin-1 -*-\n" + NEEDED], ids=range(4)
)
def test_a_damaged_file_is_unknown(tmp_path: Path, text: str) -> None:
    """Text that does not parse, is cut off, or is not UTF-8 is unknown code, and stays as it is."""
    path = site(tmp_path, text)
    assert State.UNKNOWN_CODE in states(tmp_path).values()
    with pytest.raises(kvpatches.UnknownCode):
        kvpatches.apply(site=tmp_path)
    assert path.read_text(encoding="utf-8") == text


def test_half_a_patch_is_unknown(tmp_path: Path) -> None:
    """One site of a patch mended and the other not: the tool does not guess who did what."""
    path = site(tmp_path, NEEDED.replace("if unverified and window is not None:", "if unverified:"))
    assert states(tmp_path)["vllm-52771"] is State.UNKNOWN_CODE
    assert "half patched" in detail(tmp_path, "vllm-52771")
    with pytest.raises(kvpatches.UnknownCode):
        kvpatches.apply(["vllm-52771"], tmp_path)
    assert "kvpatches" not in path.read_text(encoding="utf-8")


def test_a_mark_without_its_change_is_unknown(tmp_path: Path) -> None:
    """The tool's comment above code that is not what the tool writes: somebody edited in between."""
    path = site(tmp_path)
    kvpatches.apply(["vllm-52807"], tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("local % size == 0", "local >= 0"), encoding="utf-8")
    assert states(tmp_path)["vllm-52807"] is State.UNKNOWN_CODE


def test_a_change_by_hand_is_seen_as_applied_by_somebody_else_and_left_alone(tmp_path: Path) -> None:
    """The fix in a release that is known not to have it was put in by hand: applied, and not reverted."""
    path = site(tmp_path, _by_hand())
    before = path.read_bytes()
    row = next(r for r in kvpatches.status(tmp_path) if r.id == "vllm-52807")
    assert (row.state, row.revision) == (State.APPLIED, None) and "not by this tool" in row.detail
    assert not kvpatches.apply(["vllm-52807"], tmp_path)[0].changed
    assert not kvpatches.revert(["vllm-52807", "vllm-52771", "vllm-52923"], tmp_path)[0].changed
    assert path.read_bytes() == before


def test_the_fix_is_known_by_the_code_and_not_by_the_version(tmp_path: Path) -> None:
    """A nightly or vendor build with the fix is fixed upstream whatever it calls itself, and one without needs it."""
    site(tmp_path / "fixed", _by_hand(), version="0.29.1.dev42+gabc")
    assert states(tmp_path / "fixed")["vllm-52807"] is State.FIXED_UPSTREAM
    site(tmp_path / "needed", NEEDED, version="0.31.0+vendor")
    assert states(tmp_path / "needed")["vllm-52807"] is State.NEEDED


def test_no_vllm_is_a_state_and_an_error_for_apply(tmp_path: Path) -> None:
    """Status says not installed; apply refuses."""
    assert set(states(tmp_path).values()) == {State.NOT_INSTALLED}
    with pytest.raises(kvpatches.NotInstalled):
        kvpatches.apply(site=tmp_path)


@pytest.mark.parametrize(("version", "expected"), [("0.11.0", State.NOT_AFFECTED), ("0.40.0", State.UNKNOWN_CODE)])
def test_without_the_file_the_version_decides_between_old_and_unknown(
    tmp_path: Path, version: str, expected: State
) -> None:
    """An old vLLM has no such file and no such defect; a new one that moved it is unknown, not fine."""
    site(tmp_path, version=version).unlink()
    assert set(states(tmp_path).values()) == {expected}


def test_a_required_patch_comes_along_and_cannot_be_taken_alone(tmp_path: Path) -> None:
    """vllm-52771 brings vllm-52807, and vllm-52807 stays while vllm-52771 needs it."""
    site(tmp_path)
    [outcome] = kvpatches.apply(["vllm-52771"], tmp_path)
    assert outcome.patches == ("vllm-52807", "vllm-52771")
    with pytest.raises(kvpatches.ConfigError, match="vllm-52771"):
        kvpatches.revert(["vllm-52807"], tmp_path)


def test_the_option_is_one_switch_and_off_by_default(tmp_path: Path) -> None:
    """The finished tail and its clamp come together, only when asked for, also later."""
    path = site(tmp_path)
    kvpatches.apply(site=tmp_path)
    assert "is_finished() " not in path.read_text(encoding="utf-8")
    row = next(r for r in kvpatches.status(tmp_path) if r.id == "vllm-52771")
    assert row.options == {"finished-tail": State.NEEDED}
    kvpatches.apply(site=tmp_path, options=["finished-tail"])
    text = path.read_text(encoding="utf-8")
    assert (
        "decoding and not self.req.is_finished()" in text and "max(req.num_prompt_tokens, req.num_tokens - 1)" in text
    )


def _by_hand() -> str:
    old = """\
            start = count
            for i, block in enumerate(table[:count]):
"""
    new = """\
            first = cdiv(local, size)
            start = count
            for i in range(first, count):
                block = table[i]
"""
    assert old in NEEDED
    return NEEDED.replace(old, new).replace("assert local <= start * size", "assert local % size == 0")
