"""What cannot be is refused at the edge, or made to fit and said: contexts, ranks, versions, numbers."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import msgspec
import pytest

from kvtier.geometry import checkpoint, kv
from kvtier.plan import wishes
from kvtier.plan.decide import plan as decide
from kvtier.plan.result import Decision
from kvtier.plan.wishes import Wishes
from lmcache_nvme_backend.errors import ConfigError
from tests.unit.kvtier.boxes import UNIT, argument, facts, model, planned

GIB = 2**30


def changed_model(folder: Path, name: str = "llama-dense", **fields: object) -> str:
    """A copy of a fixture's config.json with other fields."""
    config = json.loads((UNIT / "models" / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return str(folder)


def test_context_is_shortened_to_the_pool() -> None:
    """A pool smaller than the model's context gives a --max-model-len that fits, in steps of 256, by a named rule."""
    plan = planned("cpu-only", "llama-dense")
    assert argument(plan, "--max-model-len") == "10240" == str(plan.max_model_len)
    assert plan.rule("context-fits-pool") in plan.warnings
    asked = planned("cpu-only", "llama-dense", max_model_len=32768)
    assert asked.vllm_args.count("--max-model-len") == 1
    assert argument(asked, "--max-model-len") == "10240"
    assert "your --max-model-len" in asked.rule("context-fits-pool").sentence  # type: ignore[union-attr]
    assert planned("cpu-only", "llama-dense", max_model_len=8192).rule("context-fits-pool") is None


def test_pool_of_hardly_anything_is_refused() -> None:
    """Where not even 2,048 tokens fit, the plan is refused rather than started."""
    box = msgspec.structs.replace(facts("cpu-only"), ram_available=18 * GIB)
    plan = planned(box, "llama-dense", max_model_len=4096)
    assert argument(plan, "--max-model-len") == "2048" and plan.decision is Decision.LMCACHE_NVME
    fat = msgspec.structs.replace(facts("jetson-orin"), ram_total=int(21.7 * GIB))
    refused = planned(fat, "llama-dense")
    assert refused.decision is Decision.REFUSED
    assert refused.reasons[-1].rule == "context-exceeds-pool" and refused.vllm_args == []


def test_latent_attention_is_kept_whole_on_every_rank() -> None:
    """Two ranks hold two copies of an MLA token: the pair's pool holds what one rank's part holds."""
    plan = planned("dgx-spark-pair", "deepseek-mla")
    pool = plan.tiers[0]
    rank = int(argument(plan, "--kv-cache-memory-bytes") or 0)
    assert pool.bytes == 2 * rank
    assert pool.tokens == rank // plan.kv_bytes_per_token


@pytest.mark.parametrize(
    ("box", "asked", "found"),
    [
        ("dgx-spark", {"tp": 2}, "1 device"),
        ("dgx-spark-pair", {"pp": 2}, "2 hosts"),
        ("rtx-5090", {"tp": 3}, "1 device"),
        ("rtx-3090-pair", {"tp": 2, "pp": 2}, "2 device"),
    ],
)
def test_ranks_need_devices(box: str, asked: dict[str, int], found: str) -> None:
    """More ranks than devices are an error that names --tp, the devices, and --nodes as the way out."""
    with pytest.raises(ConfigError) as caught:
        planned(box, "qwen3-gqa", **asked)
    assert caught.value.setting == "--tp"
    assert found in caught.value.found and "--nodes" in caught.value.todo
    nodes = wishes.nodes("a=10.0.0.1,b=10.0.0.2")
    assert planned("dgx-spark", "qwen3-gqa", tp=2, nodes=nodes).world_size == 2


@pytest.mark.parametrize("text", ["a=10.0.0.1,b=10.0.0.1", "a=10.0.0.1,a=10.0.0.2"])
def test_a_host_is_named_once(text: str) -> None:
    """The same address or name twice in --nodes is an error."""
    with pytest.raises(ConfigError, match="twice"):
        wishes.nodes(text)


def test_target_is_a_version() -> None:
    """A tag's v is left out; what is no version is an error."""
    assert wishes.version("v0.29.0") == "0.29.0"
    assert wishes.version("0.27.2rc1.dev77+g1234") == "0.27.2rc1.dev77+g1234"
    for text in ("latest", "", "v", "0", "0.29.0;rm", "0..1", "main-0.29"):
        with pytest.raises(ConfigError, match="--target-vllm"):
            wishes.version(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "fast", ""])
def test_rates_are_finite_and_positive(text: str) -> None:
    """Rates and seconds are finite numbers above 0; a count that may be none is not negative."""
    with pytest.raises(ConfigError, match="--link-gbps"):
        wishes.rate("--link-gbps", text, "GB a second")
    if text != "0":
        with pytest.raises(ConfigError, match="--looks"):
            wishes.number_or_none("--looks", text)
    assert wishes.number_or_none("--looks", "0") == 0
    assert wishes.rate("--link-gbps", "1.5", "GB a second") == 1.5


@pytest.mark.parametrize(
    "body", ["[]", '"llama"', "3", "null", "{}", '{"text_config": [1]}', '{"num_hidden_layers": 4}']
)
def test_configuration_that_is_none(body: str, tmp_path: Path) -> None:
    """A config.json that is a list, a text or a number, or that has no layers, is one error that names MODEL."""
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(ConfigError) as caught:
        decide(facts("rtx-5090"), str(tmp_path), Wishes())
    assert caught.value.setting == "MODEL"


@pytest.mark.parametrize("wrong", ["many", 0, -2, 1.5, [32], True, {"a": 1}])
@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings"],
)
def test_configuration_with_something_else_than_numbers(field: str, wrong: object, tmp_path: Path) -> None:
    """Text, 0, fractions, lists and truth values where a number belongs are that error too."""
    with pytest.raises(ConfigError) as caught:
        decide(facts("rtx-5090"), changed_model(tmp_path, **{field: wrong}), Wishes())
    assert caught.value.setting == "MODEL" and "config.json" in caught.value.found


def test_layer_names_nobody_knows(tmp_path: Path) -> None:
    """Layers of which none is known are an error, not a model without KV."""
    with pytest.raises(ConfigError, match="MODEL"):
        decide(facts("rtx-5090"), changed_model(tmp_path, layer_types=["novel"] * 32), Wishes())
    with pytest.raises(ConfigError, match="MODEL"):
        decide(facts("rtx-5090"), changed_model(tmp_path, layer_types=7), Wishes())


@pytest.mark.parametrize("text", ["[]", '{"metadata": null}', '{"metadata": {"total_size": "much"}}', "no json"])
def test_index_that_is_none_leaves_the_weights_unknown(text: str, tmp_path: Path) -> None:
    """An index of another shape leaves the weights unknown; it ends nothing."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert checkpoint.find(changed_model(tmp_path)).weights_bytes is None


def test_kv_dtypes_are_vllms() -> None:
    """--kv-cache-dtype takes exactly vLLM 0.32's CacheDType; each has a size, and the others are an error."""
    found = checkpoint.find(model("qwen3-gqa"))
    latent = checkpoint.find(model("deepseek-mla"))
    sizes = {
        name: kv.read(latent if name.endswith("ds_mla") else found, kv_cache_dtype=name).bytes_per_token
        for name in kv.KV_CACHE_DTYPES
    }
    assert all(size > 0 for size in sizes.values())
    assert sizes["nvfp4"] < sizes["fp8"] < sizes["fp8_per_token_head"] < sizes["bfloat16"]
    assert sizes["fp8_ds_mla"] == 656 * kv.read(latent).layers.full
    for name in ("int8", "float32", "fp4", "", "FP8"):
        with pytest.raises(ConfigError, match="--kv-cache-dtype"):
            kv.read(found, kv_cache_dtype=name)
    with pytest.raises(ConfigError, match="latent"):
        kv.read(found, kv_cache_dtype="fp8_ds_mla")


def test_kv_dtypes_against_the_installed_vllm() -> None:
    """Where vLLM 0.32 is installed, its own list is equal."""
    import ast
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no vLLM here")
    source = Path(spec.submodule_search_locations[0]) / "config" / "cache.py"
    versions = [
        importlib.metadata.version(name) for name in importlib.metadata.packages_distributions().get("vllm", [])
    ]
    if not any(version.startswith("0.32.") for version in versions):
        pytest.skip("another vLLM")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CacheDType":
            names = typing.cast(ast.Tuple, typing.cast(ast.Subscript, node.value).slice).elts
            assert {typing.cast(ast.Constant, name).value for name in names} == set(kv.KV_CACHE_DTYPES)
            return
    pytest.fail("no CacheDType in vLLM's cache.py")


@pytest.mark.parametrize(("box", "name"), [("dgx-spark", "llama-dense"), ("dgx-spark", "qwen3-gqa")])
def test_staging_of_the_pool_is_the_plans(box: str, name: str) -> None:
    """The pool leaves room for exactly the ring that the LMCache configuration asks for, and is a sum of its parts."""
    plan = planned(box, name)
    assert plan.lmcache_config is not None
    ring = plan.lmcache_config["extra_config"].get("nvme.staging_mib", 256)
    assert f"{ring} MiB staging" in plan.rule("fixed-kv-pool").sentence  # type: ignore[union-attr]
    hybrid = planned(box, "qwen3_5-hybrid")
    assert "256 MiB staging" in hybrid.rule("fixed-kv-pool").sentence  # type: ignore[union-attr]
    without = planned(box, "qwen3_5-hybrid", target_vllm="0.29.0")
    assert "0 GiB staging" in without.rule("fixed-kv-pool").sentence  # type: ignore[union-attr]


def test_no_fixed_pool_has_its_reason() -> None:
    """A model without KV gets no fixed pool on unified memory, and hears why."""
    plan = planned("dgx-spark", "mamba")
    assert "--kv-cache-memory-bytes" not in plan.vllm_args
    assert plan.rule("fixed-kv-pool-left-out") and plan.rule("unified-reserve") is None


def test_allocator_matters_to_connectors_alone() -> None:
    """A plan without a connector takes expandable_segments."""
    box = msgspec.structs.replace(
        facts("rtx-5090"), environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )
    assert planned(box, "mamba").decision is Decision.NONE
    assert planned(box, "qwen3-gqa").reasons[-1].rule == "expandable-segments"
    assert planned(box, "qwen3-gqa").decision is Decision.REFUSED


def test_tiering_is_offered_where_it_is() -> None:
    """The tiering way is named from 0.23 on, and not before."""

    def ways(target: str) -> str:
        plan = planned("dgx-spark", "qwen3_5-hybrid", target_vllm=target)
        return " ".join(way.how for way in plan.alternatives)

    assert "TieringOffloadingSpec" in ways("0.23.0") and "TieringOffloadingSpec" not in ways("0.22.1")


def test_seen_pool_smaller_than_the_context_is_said() -> None:
    """A pool seen in a log that holds less than the context of this plan is warned of."""
    from kvtier.plan.advice import EngineFigures

    figures = EngineFigures(source="log", pool_tokens=20_000, context=16384)
    assert planned("rtx-5090", "qwen3-gqa", figures=figures).rule("context-exceeds-seen-pool")
    small = planned("rtx-5090", "qwen3-gqa", figures=figures, max_model_len=16384)
    assert small.rule("context-exceeds-seen-pool") is None


def test_recipes_are_quoted() -> None:
    """Paths and names with spaces or shell characters are one word in every command that a person is told to run."""
    import shlex

    plan = planned("rtx-5090", "qwen3-gqa", ram_gib=8, nvme="/data/kv; cache", nvme_gib=50)
    recipe = next(step.command for step in plan.steps if "fallocate" in step.command)
    assert shlex.split(recipe)[-1] == "/data/kv; cache"
    pair = planned("dgx-spark-pair", "qwen3-gqa", lmcache_file="/etc/my files/l.yaml")
    there = " ".join(shlex.split(pair.nodes[0].check)[2:])
    assert "LMCACHE_CONFIG_FILE=/etc/my files/l.yaml" in shlex.split(there)
