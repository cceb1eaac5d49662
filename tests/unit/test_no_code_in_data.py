"""Nothing that the project reads can run code: no pickle, no eval, no unsafe YAML, anywhere in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGES = ("lmcache_nvme_backend", "litellm_hooks", "configs", "patches", "scripts", "benchmarks")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "__import__"}  # compile alone runs nothing
LOADERS = {"torch.load", "numpy.load", "np.load", "pandas.read_pickle"}
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (PROJECT / package).rglob("*.py"))


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.partition(".")[0] in MODULES:
                yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in LOADERS)
            if module == "yaml":
                yield from (f"yaml.{alias.name}" for alias in node.names if alias.name in UNSAFE_YAML)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in BUILTINS | LOADERS:
        yield name
    elif name.startswith("yaml.") and name.removeprefix("yaml.") in UNSAFE_YAML:
        loader = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "Loader")]
        if not any(ast.unparse(each).endswith("SafeLoader") for each in loader):
            yield name
    elif name.rpartition(".")[2] in ("import_module", "find_spec") and node.args:
        module = node.args[0]
        if isinstance(module, ast.Constant) and str(module.value).partition(".")[0] in MODULES:
            yield str(module.value)
    for word in node.keywords:
        if word.arg == "allow_pickle":
            yield "allow_pickle"


def test_no_source_reads_data_that_can_run_code():
    """A cache directory or a configuration that somebody else wrote must at worst be refused."""
    assert len(sources()) > 100
    found = {
        f"{path.relative_to(PROJECT)}: {what}"
        for path in sources()
        for what in findings(ast.parse(path.read_text("utf-8"), str(path)))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as json",
        "from marshal import loads",
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.load(text, yaml.Loader)",
        "from yaml import unsafe_load",
        "numpy.load(path)",
        "other.load(path, allow_pickle=False)",
        "importlib.import_module('shelve')",
    ],
)
def test_the_walk_finds_each_of_them(text):
    """The test above can fail."""
    assert list(findings(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["yaml.safe_load(t)", "yaml.load(t, Loader=yaml.CSafeLoader)", "re.compile(t)", "a.eval()"]
)
def test_what_is_harmless_passes(text):
    """Names that only look alike."""
    assert list(findings(ast.parse(text))) == []
