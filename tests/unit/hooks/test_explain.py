"""`python -m litellm_hooks explain`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("litellm", reason="LiteLLM is not installed")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "configs" / "examples" / "litellm-proxy.yaml"


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "litellm_hooks", "explain", *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip


def request(folder: Path, name: str, model: str, turns: int) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " * 50} for i in range(turns)]
    path = folder / name
    path.write_text(json.dumps({"model": model, "messages": messages}))
    return str(path)


def test_turns_of_a_session_are_explained(tmp_path: Path) -> None:
    """The first turn goes by rendezvous, the second to the same replica by prefix; who is not eligible is said."""
    turns = [request(tmp_path, f"{n}.json", "large", n) for n in (1, 3)]
    done = explain("--config", str(EXAMPLE), "--request", turns[0], "--request", turns[1])
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("answer: ")]
    first, second = (line.removeprefix("answer: ").split(",")[0] for line in answers)
    assert first == second
    assert "because rendezvous" in answers[0]
    assert "because prefix" in answers[1]
    assert "replica: large-4 not eligible: a lower order is available" in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"callback_settings": {"prefix_affinity": {"load_bound": 0.1}}}, "load_bound: found 0.1"),
        ({"model_list": []}, "model: found 'large'"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """A wrong setting or an unknown model ends with one line that names it."""
    config = tmp_path / "proxy.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(EXAMPLE.read_text()), **change}))
    done = explain("--config", str(config), "--request", request(tmp_path, "r.json", "large", 1))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_shadowing_file_and_missing_callback_are_said(tmp_path: Path) -> None:
    """A file beside the configuration that would run instead of the package is named, and so is a callback left out."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["litellm_settings"]["callbacks"] = []
    (tmp_path / "proxy.yaml").write_text(yaml.safe_dump(config))
    shadow = tmp_path / "litellm_hooks" / "prefix_affinity.py"
    shadow.parent.mkdir()
    shadow.write_text("instance = None\n")
    done = explain("--config", str(tmp_path / "proxy.yaml"), "--request", request(tmp_path, "r.json", "coder", 1))
    assert done.returncode == 0, done.stderr
    assert f"{shadow} beside the configuration shadows the installed package" in done.stdout
    assert "would run without the hook" in done.stdout
