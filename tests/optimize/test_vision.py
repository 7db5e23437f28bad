"""A model that sees goes the whole way: its tower is compiled, judged, planned and verified beside its decoder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from doubles import towers
from doubles.geometries import VISION

from llmc import bundle
from llmc.bundle.model.linear import Linear
from llmc.bundle.model.vision import Patching, Vision
from llmc.errors import BuildError, BundleError
from llmc.optimize.build import build
from llmc.optimize.plan.memory import memory_plan
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.runtime import load
from llmc.runtime.loading import verify
from llmc.runtime.vision.decode import DECODING_BYTES

CPU = capabilities("cpu")
# Cosine of rows in 8 bits: 0.9999 here, 0.9997 in SmolVLM2-256M's sizes. Integers of 4 bits have less than 0.99.
LEAST_COSINE = 0.998


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return towers.share_seeing(tmp_path_factory) / "checkpoint"


@pytest.fixture(scope="session")
def exported(checkpoint: Path) -> Path:
    return checkpoint.parent / "export"


@pytest.fixture(scope="session")
def built(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A bundle of a precision, made once; nobody changes it."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("seeing")

    def make(precision: str) -> Path:
        if precision not in made:
            made[precision] = build(
                BuildRequest(exported, folder / precision, precision=precision, max_context=256)
            ).output
        return made[precision]

    return make


def test_the_tower_is_judged_by_the_cosine_of_its_rows(built):
    exact, rounded = (bundle.read_bundle(built(precision)).similarity for precision in ("fp32", "int8"))
    assert exact is not None and rounded is not None
    assert exact.texts == rounded.texts == towers.TOKENS
    assert exact.smallest == pytest.approx(1, abs=1e-6)
    assert LEAST_COSINE < rounded.smallest < 1 - 1e-6


def test_a_tower_in_4_bits_is_judged_worse_than_it_may_be(exported, tmp_path):
    """A recipe's patterns reach the tower."""
    recipe = Request(layers={"vision.*": "int4"}, scheme="rtn")
    report = build(BuildRequest(exported, tmp_path / "bundle", precision="int8", recipe=recipe))
    assert report.manifest.similarity is not None
    assert report.manifest.similarity.smallest < LEAST_COSINE


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_verify_replays_the_image(built, precision):
    assert verify(built(precision)).prompts == 4


@pytest.fixture
def copied(built: Callable[[str], Path], tmp_path: Path) -> Path:
    for path in built("fp32").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "llmc.json").read_text())
    change(manifest)
    (folder / "llmc.json").write_text(json.dumps(manifest))


def test_a_tower_that_computes_something_else_is_refused(copied):
    """Values that were recorded elsewhere, the tenth part of which is twice as large."""
    edit(copied, lambda manifest: manifest["vectors"][0].update(values=double_some(manifest["vectors"][0]["values"])))
    with pytest.raises(BundleError, match=r"rows of an image differ by .* this machine computes something else"):
        load(copied, self_test=True)


def double_some(values: list[float]) -> list[float]:
    return [2 * value if number % 10 == 0 else value for number, value in enumerate(values)]


@pytest.mark.parametrize("vectors", [[], [{"prompt": [1], "values": [1.0] * 256}], [{"prompt": [], "values": [1.0]}]])
def test_a_golden_image_that_no_build_writes_is_refused(copied, vectors):
    edit(copied, lambda manifest: manifest.update(vectors=vectors))
    with pytest.raises(BundleError, match=r"golden vector \(rows of an image\) of the manifest is corrupt"):
        load(copied, self_test=True)


def test_a_tower_that_is_no_vision_transformer_is_no_match(exported, tmp_path):
    """An attention with a mask is another operator, so the export is refused and no wrong graph is made."""
    for path in exported.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    model = ir.load(tmp_path / "vision.onnx")
    attention = next(node for node in model.graph if node.op_type == "Attention")
    attention.domain = "other"
    (tmp_path / "vision.onnx").unlink()
    ir.save(model, tmp_path / "vision.onnx")
    with pytest.raises(BuildError, match="pass 'attend to patches' applied 1 times to the vision graph, 2 expected"):
        build(BuildRequest(tmp_path, tmp_path / "bundle", precision="fp32"))


def test_the_plan_counts_the_tower_and_rows_of_images(exported):
    geometry = bundle.read_export(exported).geometry
    linears = (*VISION.linears, Linear("vision.layers.0.mlp.up_proj", 3072, 768, True, "vision", "", 0))
    seeing = replace(geometry, vision=replace(VISION, linears=linears))
    recipe, limits = resolve(Request(precision="fp32"), CPU, 512, "test")
    blind, found = (memory_plan(it, limits, recipe, 0) for it in (replace(geometry, vision=None), seeing))
    weights, values = 4 * (768 * 768 + 3072 * 768), 4 * 1024 * (6 * 3072 + 8 * 768)
    assert (blind["tower"].fixed, found["tower"].fixed) == (
        0,
        weights + values + 11_000_000 + 64_000_000 + DECODING_BYTES,
    )
    assert found["workspace"].per_length - blind["workspace"].per_length == 4 * geometry.hidden_size
    assert found.total(100) - blind.total(100) == found["tower"].fixed + 400 * geometry.hidden_size


def test_the_plan_counts_the_patches_of_the_largest_image_that_fits_into_the_context(exported):
    geometry = bundle.read_export(exported).geometry
    patching = Patching(3136, 12_845_056, "bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 2, 4, 0)
    linears = (*VISION.linears, Linear("vision.layers.0.mlp.up_proj", 3072, 768, True, "vision", "", 0))
    vision = Vision(28, 14, 1, 0, None, VISION.markers, 1, linears, patching, 3, 2)
    seeing, recipe = replace(geometry, vision=vision), resolve(Request(precision="fp32"), CPU, 512, "test")[0]
    assert vision.most_tokens == 16_384
    for context, tiles in ((512, 512), (32_768, 16_384)):
        limits = replace(resolve(Request(precision="fp32"), CPU, 65_536, "test")[1], max_context=context)
        found = memory_plan(seeing, limits, recipe, 0)
        weights, values = 4 * (768 * 768 + 3072 * 768), 4 * 4 * tiles * (6 * 3072 + 8 * 768)
        assert found["tower"].fixed == weights + values + 11_000_000 + 64_000_000 + DECODING_BYTES
    blind = memory_plan(replace(geometry, vision=None), limits, recipe, 0)
    assert found["workspace"].per_length - blind["workspace"].per_length == 4 * 3 * geometry.hidden_size
