"""A build publishes a whole bundle: what it lists is there, what it holds runs, and it says how good it is."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import onnx_ir as ir
import pytest

from llmc.bundle import CACHE_BYTES, WEIGHTS_FILE, Geometry, Manifest, read_bundle, read_export, verify_files
from llmc.errors import BuildError, UsageError
from llmc.optimize.build import build
from llmc.optimize.judge.reference import Reference
from llmc.optimize.recipe import BuildRequest, Request
from llmc.optimize.weights.file import ALIGNMENT
from llmc.runtime import load
from llmc.runtime.loading import verify

UNTIED, TIED = "llama-biases", "qwen2-tied-bf16"
# Of the small model rotary tables, the matrix that rotates, scales per output, and the page that each tensor begins on.
OTHER_TENSORS = 800_000
# Random weights in 4 bits are far from the unquantized model, and a wrong graph farther: its KL is several nats.
LARGEST_KL = 1.0


@pytest.fixture(scope="module")
def built(exported, tmp_path_factory):
    """A bundle of a random checkpoint by name and precision; each is built once."""
    made = {}

    def get(name: str, precision: str, phases: str = ""):
        key = (name, precision, phases)
        if key not in made:
            folder = tmp_path_factory.mktemp("built")
            recipe = folder / "recipe.toml"
            recipe.write_text(f'phases = "{phases}"\n[layers]\n' if phases else "")
            made[key] = build(
                BuildRequest(exported(name).export, folder / "bundle", precision=precision, recipe=recipe)
            )
        return made[key]

    return get


KINDS = [
    (name, precision, phases)
    for name, precision, phases in (
        (UNTIED, "fp32", ""),
        (UNTIED, "int8", ""),
        (TIED, "int8", "shared"),
        (TIED, "int4", "split"),
        (UNTIED, "int4", "shared"),
    )
]


@pytest.mark.parametrize("recipe", [Request(sparsity=0.5, precision="fp32"), Request(sparsity="2:4", phases="shared")])
def test_a_pruned_bundle_says_so(exported, tmp_path, recipe):
    report = build(BuildRequest(exported(UNTIED).export, tmp_path / "bundle", recipe=recipe))
    manifest = report.manifest
    assert (manifest.recipe.sparsity, manifest.recipe.pruning) == (str(recipe.sparsity), "magnitude")
    assert any("set to zero by the rule magnitude" in note for note in manifest.notes)
    assert verify(report.output, threads=1).equal_tokens > 0


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_the_bundle_is_whole(built, kind):
    report = built(*kind)
    manifest = read_bundle(report.output)
    assert manifest == report.manifest
    assert list(verify_files(report.output, manifest)) == list(manifest.files)
    assert {path.name for path in report.output.iterdir()} == {*manifest.files, "llmc.json"}
    assert [path.name for path in report.output.parent.iterdir() if path.name.startswith(".")] == []
    assert report.size == sum((report.output / name).stat().st_size for name in manifest.files)
    assert report.seconds > 0


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_the_bundle_passes_its_own_self_test_to_the_last_token(built, kind):
    report = verify(built(*kind).output, threads=1)
    assert report.equal_tokens == report.tokens >= 4 * 16
    assert report.largest_difference < 1e-3


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_the_manifest_holds_source_recipe_and_quality(built, exported, kind):
    manifest, export = built(*kind).manifest, read_export(exported(kind[0]).export)
    assert (manifest.geometry, manifest.source, manifest.generation) == (
        export.geometry,
        export.source,
        export.generation,
    )
    assert manifest.recipe.precision == kind[1]
    assert manifest.recipe.name == "recipe"
    assert manifest.quality.positions >= 4 * 16
    assert 0 <= manifest.quality.mean_kl < LARGEST_KL
    assert 0 <= manifest.quality.top1_agreement <= 1


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_graphs_use_only_what_the_oldest_engine_knows(built, kind):
    for graph in set(built(*kind).manifest.graphs.values()):
        model = ir.load(built(*kind).output / graph.file)
        assert model.opset_imports == {"": 21, "com.microsoft": 1}
        assert model.ir_version == 10
        assert {node.domain for node in model.graph} == {"", "com.microsoft"}
        assert not model.functions


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_weights_are_counted_as_they_are_read(built, kind):
    """Per step everything but the embedding's rows and the rotary tables; the memory plan counts each graph once."""
    manifest = built(*kind).manifest
    g, size = manifest.geometry, (built(*kind).output / WEIGHTS_FILE).stat().st_size
    for graph in manifest.graphs.values():
        least = matrices(g) * bytes_per_weight(manifest.recipe.precision)
        assert least < graph.step_weight_bytes <= graph.weight_bytes
        assert graph.weight_bytes <= size + OTHER_TENSORS
    assert (
        manifest.memory["weights"].fixed
        >= sum(graph.step_weight_bytes for graph in set(manifest.graphs.values())) * 0.95
    )
    assert manifest.memory["cache"].per_position == g.cache_bytes(1, bytes_per_value=CACHE_BYTES[manifest.cache])


def matrices(g: Geometry) -> int:
    """Weights of all layers' linears."""
    first, inner = g.attentions[0], g.mlps[0].inner
    attention = (2 * first.heads + 2 * first.kv_heads) * first.head_dim * g.hidden_size
    return g.layers * (attention + 3 * inner * g.hidden_size)


def bytes_per_weight(precision: str) -> float:
    return {"fp32": 4, "int8": 1, "int4": 0.5}[precision]


def plain_bytes(folder: Path, manifest: Manifest) -> int:
    """Bytes of the weights of all plain graphs, those that they share counted once; each begins on a page."""
    models = [ir.load(folder / file) for file in {graph.file for graph in manifest.graphs.values()}]
    tensors = [value.const_value for model in models for value in model.graph.initializers.values()]
    sizes = {tensor.offset: tensor.length for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_tied_head_shares_its_bytes_with_the_embedding(layer_export, tmp_path, precision):
    """In a model of one layer the embedding is the larger part: a second copy would show."""
    recipe = Request(layers={}, **({"phases": "split"} if precision == "int4" else {}))
    folder = build(BuildRequest(layer_export, tmp_path / "b", precision=precision, recipe=recipe)).output
    manifest = read_bundle(folder)
    g = manifest.geometry
    assert g.tied_head
    # Bytes per weight with scales, and zero points of half a byte, in blocks of 32.
    matrix = {"fp32": 4, "int8": 1 + 4 / 32, "int4": 0.5 + 4.5 / 32}
    # The prefill graph of a split bundle has integers of its own, 8 bits each.
    body = matrices(g) * (matrix[precision] + (manifest.recipe.phases == "split"))
    table = g.vocab_size * g.hidden_size * matrix[manifest.recipe.head]
    rest = plain_bytes(folder, manifest) - body - table
    assert 0 < rest < OTHER_TENSORS < table


def test_limits_reach_the_bundle_and_its_rotary_tables(exported, tmp_path):
    report = build(
        BuildRequest(exported(TIED).export, tmp_path / "bundle", precision="fp32", max_context=40, max_batch=3)
    )
    assert (report.manifest.limits.max_context, report.manifest.limits.max_batch) == (40, 3)
    cos = ir.load(report.output / "decoder.onnx").graph.initializers["rotary_emb.0.cos"]
    assert tuple(cos.shape) == (40, report.manifest.geometry.attentions[0].head_dim // 2)
    with load(report.output, threads=1) as model:
        assert model.generate([1] * 30, max_tokens=10, ignore_eos=True).usage.completion_tokens == 10


@pytest.mark.parametrize("context", [2, 23, 24, 25])
def test_a_context_shorter_than_the_golden_prompts_builds(exported, tmp_path, context):
    report = build(BuildRequest(exported(TIED).export, tmp_path / "bundle", max_context=context))
    assert verify(report.output, threads=1).prompts > 0


def test_progress_names_each_step_and_never_goes_back(exported, tmp_path):
    steps: list[tuple[str, float | None]] = []
    build(
        BuildRequest(exported(TIED).export, tmp_path / "bundle"),
        lambda step, fraction=None: steps.append((step, fraction)),
    )
    names = list(dict.fromkeys(step for step, _ in steps))
    assert [name.split()[0] for name in names][:3] == ["lowering", "hashing", "running"]
    for name in names:
        shares = [share for step, share in steps if step == name and share is not None]
        assert shares == sorted(shares)
        assert not shares or (shares[0], shares[-1]) == (0.0, 1.0)


def test_building_twice_gives_the_same_bytes(exported, tmp_path):
    one, two = (
        build(BuildRequest(exported(TIED).export, tmp_path / name, precision="int4")).manifest
        for name in ("one", "two")
    )
    assert one.files == two.files


def test_force_replaces_a_bundle(exported, tmp_path):
    build(BuildRequest(exported(TIED).export, tmp_path / "bundle", precision="fp32"))
    with pytest.raises(UsageError, match="exists"):
        build(BuildRequest(exported(TIED).export, tmp_path / "bundle", precision="int4"))
    build(BuildRequest(exported(TIED).export, tmp_path / "bundle", precision="int4", force=True))
    assert json.loads((tmp_path / "bundle" / "llmc.json").read_text())["recipe"]["precision"] == "int4"
    assert not (tmp_path / "bundle" / "decoder.onnx").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_tokenizer_of_another_model_is_noticed(tiny_export, tiny_bundle, tmp_path):
    assert not any("perplexity" in note for note in read_bundle(tiny_bundle).notes)
    folder = shutil.copytree(tiny_export, tmp_path / "export")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"] for token in tokenizer["added_tokens"]}
    words = [word for word in tokenizer["model"]["vocab"] if word not in added]
    ids = [tokenizer["model"]["vocab"][word] for word in words]
    tokenizer["model"]["vocab"] |= dict(zip(words, reversed(ids), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    manifest = build(BuildRequest(folder, tmp_path / "bundle")).manifest
    said = f"has a perplexity of {manifest.quality.reference_perplexity:.4g} on golden prompts"
    assert any(said in note and "chance has 4096" in note for note in manifest.notes)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_build_that_rounds_nothing_is_the_unquantized_model(exported, tmp_path, monkeypatch, precision):
    """A reference that has lost its multipliers is another model; integers may differ from it."""
    monkeypatch.setattr(Reference, "_factor", lambda *_: 1.0)
    expected = nullcontext() if precision == "int4" else pytest.raises(BuildError, match="llmc made another model")
    with expected:
        build(BuildRequest(exported("granite-multipliers").export, tmp_path / "bundle", precision=precision))
    assert (tmp_path / "bundle").exists() == (precision == "int4")
