"""int8 beside floats on a GPU: both are built, run in turns, and the slower one is named; nothing stays."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from doubles.cuda import FakeDriver
from doubles.engines import spec_of
from doubles.geometries import uniform
from doubles.tensorrt import MAGIC, FakeTensorRT

from llmc.bundle import EngineConfig
from llmc.errors import BuildError
from llmc.inventory import HEAD, Codes
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.tensorrt import products as module
from llmc.optimize.tensorrt.builder import build_model
from llmc.optimize.tensorrt.products import Compared, compare, products, stores_bytes

# Of GPUs for which engines are built: that of an RTX 5090.
LARGEST_CACHE = 96_000_000
GEOMETRY = uniform("llama", 2, 72, 104, 4, 2, 16, 97, 64, False, (0, 0))


def plan(spec: Any, model: onnx.ModelProto, output: Path, profiles: Sequence[Any]) -> None:
    """An engine of the double's."""
    kept = output.parent / "kept" / f"{output.name}.onnx"
    kept.parent.mkdir(exist_ok=True)
    onnx.save(model, kept)
    size = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    content = {"magic": MAGIC, "onnx": str(kept), "profiles": [{"given": [[1, size]] * 3}], "aliases": {}}
    output.write_bytes(json.dumps(content).encode())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES", 100_000)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("costs", "slower"), [((2e-3, 1e-3), "int8"), ((1e-3, 4e-3), "floats")])
def test_the_slower_one_is_named(config: EngineConfig, tmp_path: Path, compiles: bool, costs: Any, slower: str):
    driver = FakeDriver()
    library = FakeTensorRT(driver, compiles=compiles)

    def clock() -> float:
        return sum(cost * len(context.history) for cost, context in zip(costs, library.contexts, strict=True))

    found = compare(spec_of(library, config), tmp_path, GEOMETRY, driver, clock, plan)
    assert (found.int8, found.floats) == pytest.approx(costs)
    assert str(found).startswith(f"{slower} is the slower one, by a factor of {max(costs) / min(costs):.2f}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert driver.leaks == []


def test_a_builder_that_refuses_leaves_nothing(config: EngineConfig, tmp_path: Path):
    def refuse(*_: Any) -> None:
        raise BuildError("no kernels")

    with pytest.raises(BuildError, match="no kernels"):
        compare(spec_of(FakeTensorRT(FakeDriver()), config), tmp_path, GEOMETRY, FakeDriver(), build=refuse)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wide", [False, True])
def test_scales_are_those_of_the_decoder(config: EngineConfig, tmp_path: Path, wide: bool):
    driver = FakeDriver()
    library = FakeTensorRT(driver)
    clock = iter(range(1000)).__next__
    compare(spec_of(library, config), tmp_path, GEOMETRY, driver, clock, plan, wide_scales=wide)
    kinds = {
        path.name: {weight.data_type for weight in onnx.load(path).graph.initializer}
        for path in (tmp_path / "kept").iterdir()
    }
    scales = onnx.TensorProto.FLOAT if wide else onnx.TensorProto.FLOAT16
    int8, floats = {onnx.TensorProto.INT8, scales}, {onnx.TensorProto.FLOAT16}
    assert kinds == {".int8.plan.onnx": int8, ".floats.plan.onnx": floats}


@pytest.mark.parametrize("scales", ["float16", "float32", None])
def test_the_librarys_own_parser_and_builder_take_the_products(
    rtx: Any, config: EngineConfig, tmp_path: Path, scales: str | None
):
    model, output = products(64, 96, "float16", scales), tmp_path / "products.plan"
    report = build_model(spec_of(rtx, config), model, output, [{"rows": (1, 1, 1)}])
    assert sum(layer.type == "MATRIX_MULTIPLY" for layer in report.layers) >= 2


def test_weights_of_8_bits_are_more_than_caches_hold_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    inputs, outputs = 2048, 8192
    weights = products(inputs, outputs, "float16", "float16").graph.initializer
    assert sum(len(weight.raw_data) for weight in weights if weight.data_type == onnx.TensorProto.INT8) > LARGEST_CACHE


def test_microseconds_are_told():
    assert "took 20 us with weights of 8 bits and 10 us in floats" in str(Compared(20e-6, 10e-6))


@pytest.mark.parametrize(
    ("asked", "bits", "told"),
    [
        (Request(precision="int8"), 0, True),
        (Request(precision="int8", activations="static"), 0, True),
        (Request(precision="int4", head="int8"), 0, False),
        (Request(precision="int4", layers={"*.down_proj": "int8"}), 0, True),
        (Request(precision="fp16"), 0, False),
        (Request(precision="source"), 4, False),
        (Request(precision="source"), 8, True),
        (Request(precision="source", layers={"*.down_proj": "int8"}), 4, True),
    ],
    ids=["int8", "static", "head", "some", "fp16", "own 4 bits", "own 8 bits", "own 4 bits and some"],
)
def test_only_who_stores_8_bits_is_told_of_them(asked: Request, bits: int, told: bool):
    """Of the head, which is one product of many and the last to be rounded, nothing is said."""

    def coded(linear: Any) -> Any:
        codes = Codes(bits, 32 if bits == 4 else linear.inputs, False)
        return linear if linear.name == HEAD or not bits else replace(linear, codes=codes)

    geometry = replace(GEOMETRY, linears=tuple(map(coded, GEOMETRY.linears)))
    recipe, _ = resolve(asked, capabilities("tensorrt"), 512, "test", calibrated=True, coded=bool(bits))
    assert stores_bytes(recipe, geometry) is told
