"""`kvtier store` as a person or a script meets it: words, JSON, exit codes, and mistakes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier import cli
from kvtier.store import options, words
from lmcache_nvme_backend.errors import ConfigError
from lmcache_nvme_backend.store import ChunkStore, Namespace, StoreSettings, digest_fields
from lmcache_nvme_backend.store.survey import Part, Recency

FACTS = {"kv_dtype": "bfloat16", "rank": 0, "world_size": 2, "chunk_tokens": 256}
OLD = Namespace({**FACTS, "model": "weights:" + "1" * 32}, {"model_name": "/models/[m]"})
NEW = Namespace({**FACTS, "model": "weights:" + "2" * 32}, {"model_name": "/models/[m]"})
KEYS = [digest_fields("command", depth) for depth in range(4)]


def kvtier(*words: str, answer: str = "") -> SimpleNamespace:
    """The command in this process; its start takes a second of its own otherwise."""
    done = CliRunner().invoke(cli.app, ["store", *words], input=answer)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of four chunks of weights that were replaced, and four of those that replaced them."""
    return filled(tmp_path / "root")


@pytest.fixture(scope="module")
def lasting_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for tests that change nothing."""
    return filled(tmp_path_factory.mktemp("lasting") / "root")


def filled(path: Path) -> Path:
    path.mkdir()
    for namespace, then in ((OLD, time.time() - 7200), (NEW, time.time() - 3600)):
        with ChunkStore.open(path, namespace, StoreSettings(quota_bytes=1 << 30)) as store:
            for depth, key in enumerate(KEYS):
                store.put(key, memoryview(os.urandom(60_000)), depth=depth)
        for file in (path / "v1" / namespace.digest).rglob("*"):
            os.utime(file, (then, then))
    return path


def files(root: Path) -> int:
    return len(list(root.glob("v1/*/*/*.kv")))


def test_inspect_says_which_namespace_is_which_and_which_is_stale(root):
    """Model, dtype, rank, weights and the reason, in words; names with brackets are no markup."""
    done = kvtier("inspect", str(root))
    assert done.returncode == 0, done.stderr
    for text in ("/models/[m]", "bfloat16", "rank 0 of 2", "weights:111111111111…", "256 tokens a chunk"):
        assert text in done.stdout
    assert f"stale: other weights have been used at /models/[m] since: {NEW.digest}" in done.stdout
    assert "not open" in done.stdout and "as it should be" in done.stdout


def test_inspect_json_goes_to_a_file_or_to_standard_output(root, tmp_path):
    """`-` prints it and nothing else."""
    (found,) = json.loads(kvtier("inspect", str(root), "--json", "-").stdout)
    assert found["layout"] == "nvme" and {part["name"] for part in found["parts"]} == {OLD.digest, NEW.digest}
    assert found["ledgers"]["account_used"] == found["ledgers"]["found"]
    done = kvtier("inspect", str(root), "--json", str(tmp_path / "found.json"))
    assert "/models/[m]" in done.stdout
    (again,) = json.loads((tmp_path / "found.json").read_text())
    assert again["nbytes"] == found["nbytes"] > 0


def test_verify_ends_with_one_where_something_is_bad(root):
    """Zero for a good store; one for a bad one, also when the bad file is removed; then zero again."""
    done = kvtier("verify", str(root))
    assert done.returncode == 0 and "8 chunks are good" in done.stdout
    bad = next(iter(sorted(root.glob("v1/*/*/*.kv"))))
    bad.write_bytes(bad.read_bytes()[:-1] + b"x" + b"y")
    done = kvtier("verify", str(root))
    assert done.returncode == 1 and "truncated" in done.stdout and bad.name in done.stdout and bad.exists()
    done = kvtier("verify", str(root), "--remove-bad", "--json", "-")
    assert done.returncode == 1 and json.loads(done.stdout)["bad"][0]["removed"] and not bad.exists()
    assert kvtier("verify", str(root)).returncode == 0


def test_verify_shows_progress_with_bytes_a_second_on_a_terminal(root):
    """On a terminal only: a script's output stays clean."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli", "store", "verify", str(root)],
        stdout=subprocess.PIPE, stderr=theirs, check=False,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert done.returncode == 0
    assert b"8 chunks" in shown and b"/s" in shown
    assert kvtier("verify", str(root)).stderr == ""


def test_prune_shows_first_and_removes_only_when_told(root):
    """--dry-run removes nothing; without an answer nothing goes; with yes what was shown goes."""
    shown = kvtier("prune", str(root), "--stale", "--dry-run")
    assert shown.returncode == 0 and "4 chunks" in shown.stdout and OLD.digest[:12] in shown.stdout
    for answer in ("n\n", "\n"):
        done = kvtier("prune", str(root), "--stale", answer=answer)
        assert done.returncode == 0 and "Nothing was removed" in done.stdout
    unanswered = kvtier("prune", str(root), "--stale")
    assert unanswered.returncode == 2 and "--yes" in unanswered.stderr
    assert files(root) == 8
    assert "Removed 4 chunks" in kvtier("prune", str(root), "--stale", answer="y\n").stdout
    assert files(root) == 4 and not (root / "v1" / OLD.digest).exists()
    done = kvtier("prune", str(root), "--stale", "--yes")
    assert done.returncode == 0 and "Nothing is to go" in done.stdout


def test_each_condition_of_prune_chooses_what_it_says(root):
    """By the head of a name, by what may stay, by age; several must all be met."""
    size = sum(path.stat().st_size for path in root.glob(f"v1/{OLD.digest}/*/*.kv")) / 2**30

    def chosen(*conditions: str) -> dict[str, int]:
        (told,) = json.loads(kvtier("prune", str(root), *conditions, "--dry-run", "--json", "-").stdout)["plans"]
        return {part["name"]: part["chunks"] for part in told["parts"]}

    assert chosen("--namespace", NEW.digest[:10]) == {NEW.digest: 4}
    assert chosen("--keep-gib", str(size * 1.5)) == {OLD.digest: 2}
    assert chosen("--keep-gib", str(size * 0.5)) == {OLD.digest: 4, NEW.digest: 2}
    assert chosen("--older-than", "30min") == {OLD.digest: 4, NEW.digest: 4}
    assert chosen("--older-than", "30min", "--namespace", NEW.digest) == {NEW.digest: 4}
    assert chosen("--stale", "--older-than", "3h") == {}
    assert chosen("--stale", "--stale-after", "30min") == {OLD.digest: 4, NEW.digest: 4}
    assert files(root) == 8
    assert kvtier("prune", str(root), "--namespace", NEW.digest[:10], "--yes").returncode == 0
    assert files(root) == 4 and not (root / "v1" / NEW.digest).exists()


def test_prune_json_tells_plan_and_outcome(root):
    """For a script, with --yes."""
    told = json.loads(kvtier("prune", str(root), "--older-than", "90min", "--yes", "--json", "-").stdout)
    assert told["removed"]["chunks"] == told["plans"][0]["chunks"] == 4
    assert told["plans"][0]["parts"][0]["name"] == OLD.digest
    told = json.loads(kvtier("prune", str(root), "--keep-gib", "0", "--dry-run", "--json", "-").stdout)
    assert told["removed"] is None and told["plans"][0]["kept_bytes"] == 0 and files(root) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prune", "ROOT"], "--keep-gib"),
        (["prune", "ROOT", "--keep-gib", "4GB"], "--keep-gib"),
        (["prune", "ROOT", "--keep-gib=-1"], "--keep-gib"),
        (["prune", "ROOT", "--older-than", "7"], "--older-than"),
        (["prune", "ROOT", "--older-than", "7y"], "--older-than"),
        (["prune", "ROOT", "--older-than=-7d"], "--older-than"),
        (["prune", "ROOT", "--older-than", "999999999w"], "--older-than"),
        (["prune", "ROOT", "--namespace", ""], "--namespace"),
        (["prune", "ROOT", "--namespace", "zz", "--yes"], "--namespace"),
        (["prune", "ROOT", "--stale", "--json", "-"], "--json"),
        (["inspect", "ROOT", "--stale-after", "soon"], "--stale-after"),
        (["inspect", "ROOT", "--json", "ROOT"], "--json"),
        (["inspect", "ROOT", "--json", "/nowhere/at/all.json"], "--json"),
        (["inspect", "ROOT/nowhere"], "ROOT"),
        (["inspect", "ROOT/v1"], "ROOT"),
        (["verify", "ROOT/v1/account"], "ROOT"),
        (["prune", "/proc", "--keep-gib", "0", "--yes"], "ROOT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_clear_error_and_nothing_is_lost(lasting_root, arguments, named):
    """Exit code 2 and one message that names what is wrong and what is allowed, without a traceback."""
    done = kvtier(*(word.replace("ROOT", str(lasting_root)) for word in arguments))
    assert done.returncode == 2, done.stdout
    assert named in done.stderr and "allowed" in done.stderr and "Traceback" not in done.stderr
    assert files(lasting_root) == 8


def test_an_error_is_json_where_json_was_asked_for(lasting_root):
    """On standard output, as of the other commands."""
    error = json.loads(kvtier("inspect", str(lasting_root / "nowhere"), "--json", "-").stdout)["error"]
    assert error["setting"] == "ROOT"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2 d", 172_800), ("1W", 604_800), ("0d", 0)]
)
def test_durations(text, seconds):
    """A number and a unit."""
    assert options.duration("--older-than", text) == seconds


@pytest.mark.parametrize("check", [options.duration, options.gibibytes])
@pytest.mark.parametrize("text", ["", "nan", "inf", "1e400", "0x10", "seven days", "1d2h", "\u0661d"])
def test_what_is_no_number_with_a_unit_is_refused(check: Callable[[str, str], Any], text):
    """By the option's name."""
    with pytest.raises(ConfigError, match="--x"):
        check("--x", text)


def test_words_of_a_vllm_configuration_and_of_nothing():
    """What is not known is said to be."""
    facts = {"inference_engine": "vllm", "dtype": "torch.bfloat16", "tp_size": 2, "tokens_per_hash": 16}
    assert words.details(Part("x", facts)) == "torch.bfloat16, tp 2, 16 tokens a block"
    assert words.title(Part("x")) == "unknown: no namespace.json" and words.state(Part("x")) == "not known"
    assert words.recency([Recency(3600, 1, 25), Recency(None, 1, 75)]) == "1 h 25%, longer ago 75%"
    assert (words.span(100), words.span(119 * 60), words.span(49 * 3600)) == ("100 s", "119 min", "2 d")
    assert words.ago(None, 0) == "never" and words.size(1536) == "1.5 KiB"
