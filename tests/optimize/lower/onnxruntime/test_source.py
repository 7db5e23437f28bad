"""A quantized checkpoint's own integers go into the bundle bit for bit, and compute what they stand for."""

from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
from doubles import packers
from doubles.geometries import uniform
from doubles.lowerings import difference
from doubles.refusals import about

from llmc.bundle import DECODER_FILE, Limits, read_export
from llmc.bundle.model.linear import Codes
from llmc.errors import UsageError
from llmc.export import export
from llmc.optimize.build import build
from llmc.optimize.lower.context import LoweringContext, WeightOnly, quant_configs
from llmc.optimize.lower.raising import Linear, raise_linears
from llmc.optimize.lower.tensorrt.weights import integer_columns
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import BuildRequest, Request, resolve
from llmc.optimize.targets import capabilities
from llmc.optimize.weights.file import WeightFile
from llmc.optimize.weights.store import Calibrated

# As of other lowerings in float32: both sides compute with the same integers and scales. One code off, or the scale of
# another block, costs more than 1e-2.
FLOAT_TOLERANCE = 2e-4
SCHEMES = ("awq", "gptq-zeros-act-order", "gptq_v2-8-bits", "packed-int4-bf16", "int8-channel")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A quantized checkpoint by its scheme: the scheme, what it holds, and its export; each is made once."""

    return cache(lambda name: packers.export_shared(name, tmp_path_factory))


@pytest.fixture(scope="module", params=SCHEMES)
def case(request, made):
    """Each of the schemes in turn."""
    return made(request.param)


def source_recipe(geometry, target="cpu", **request):
    return resolve(Request(**request), capabilities(target), 128, "x", coded=bool(geometry.coded))[0]


def start(lowering, folder, **request):
    """A lowering with the storage that the default recipe asks for."""
    lowered = lowering(folder)
    recipe = source_recipe(lowered.geometry, phases="shared", **request)
    object.__setattr__(lowered.context, "quant", quant_configs(recipe, lowered.geometry)["shared"])
    return lowered


def levels(lowered, parts, matrices):
    """The integers of a MatMulNBits and of the checkpoint's matrices, from 0, and the columns that its input picks."""
    node = next(node for node in lowered.nodes("MatMulNBits") if node.inputs[1].name.startswith(f"{parts[0]}.weight"))
    packed = node.inputs[1].const_value
    data = np.fromfile(packed.path, np.uint8, packed.length, offset=packed.offset).reshape(packed.shape.numpy())
    if node.attributes["bits"].as_int() == 4:
        data = np.stack([data & 15, data >> 4], axis=-1)
    found = data.reshape(len(data), -1)[:, : node.attributes["K"].as_int()]
    gather = node.inputs[0].producer()
    columns = gather.inputs[1].const_value.numpy() if gather.op_type == "Gather" else np.arange(found.shape[1])
    return found, np.concatenate([matrix.levels for matrix in matrices])[:, columns]


def test_codes_are_the_checkpoints(case, lowering):
    _, written, folder = case
    lowered = start(lowering, folder, head="fp32").finish()
    at = "model.layers.0"
    for parts in ([f"{at}.self_attn.{part}_proj" for part in "qkv"], [f"{at}.mlp.down_proj"]):
        found, expected = levels(lowered, parts, [written.matrices[part] for part in parts])
        np.testing.assert_array_equal(found, expected)


def test_logits_are_those_of_the_floats_that_the_codes_stand_for(case, lowering, decoder, ids):
    _, written, folder = case
    lowered = start(lowering, folder, head="fp32").finish()
    lowered.exact()
    found = decoder(lowered.write(), lowered.geometry)(ids)
    assert difference(found, written.logits(np.array([ids]))[0]) <= FLOAT_TOLERANCE


def test_one_sort_serves_all_that_read_the_same(lowering, case):
    scheme, _, folder = case
    lowered = start(lowering, folder).finish()
    sorts = [node for node in lowered.nodes("Gather") if node.name.endswith(".input.Gather")]
    assert len(sorts) == (4 if scheme.grid.ordered else 0)  # q, k and v, then o, gate and up, down


def test_experts_have_the_checkpoints_codes_and_zero_points(lowering, tmp_path):
    """Of gate and up the rows in turn."""
    written = packers.write_checkpoint(packers.SCHEMES["awq"], tmp_path / "checkpoint", **packers.MIXTURE)
    lowered = start(lowering, export(tmp_path / "checkpoint", tmp_path / "export").output).finish()
    [node] = lowered.nodes("QMoE")
    at = "model.layers.0.mlp.experts"
    for place, (first, second) in ((2, ("gate_proj", "up_proj")), (5, ("down_proj", "down_proj"))):
        for expert in range(4):
            halves = [written.matrices[f"{at}.{expert}.{part}"] for part in (first, second)]
            for held, values in ((place, "levels"), (11 + (place == 5), "zeros")):
                expected = np.stack([getattr(half, values) for half in halves], 1)
                expected = expected.reshape(-1, expected.shape[2]) if place == 2 else expected[:, 0]
                packed = node.inputs[held].const_value
                data = np.fromfile(packed.path, np.uint8, packed.length, offset=packed.offset)
                data = data.reshape(packed.shape.numpy())[expert]
                found = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
                np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)


def test_linears_of_different_orders_stay_apart(lowering, decoder, ids, tmp_path):
    scheme = packers.SCHEMES["gptq-zeros-act-order"]
    grid = replace(scheme.grid, own_order=True)
    written = packers.write_checkpoint(replace(scheme, grid=grid), tmp_path / "checkpoint")
    lowered = start(lowering, export(tmp_path / "checkpoint", tmp_path / "export").output, head="fp32").finish()
    lowered.exact()
    assert len([node for node in lowered.nodes("Gather") if node.name.endswith(".input.Gather")]) == 7
    found = decoder(lowered.write(), lowered.geometry)(ids)
    assert difference(found, written.logits(np.array([ids]))[0]) <= FLOAT_TOLERANCE


@pytest.mark.parametrize(
    ("codes", "inputs", "grid"),
    [
        (Codes(4, 128, True), 896, Grid(4, 128, False)),
        (Codes(4, 1024, False), 2048, Grid(4, 256)),
        (Codes(8, 96, False), 192, Grid(8, 32)),
        (Codes(8, 100, True), 100, Grid(8, 128, False)),  # a whole row: its last block may be short
        (Codes(4, 32, False, True), 896, Grid(4, 32, shifted=True)),
        (Codes(4, 24, False), 48, None),
    ],
    ids=str,
)
def test_blocks_of_kernels_lie_within_those_of_the_checkpoint(codes, inputs, grid):
    geometry = uniform("llama", 1, inputs, 64, 2, 2, 16, 96, 128, False, (0,))
    geometry = replace(geometry, linears=tuple(replace(x, inputs=inputs, codes=codes) for x in geometry.linears))
    if grid is None:
        with pytest.raises(UsageError, match=r"like those of .*4 bits in blocks of 24\); build with --int4"):
            quant_configs(source_recipe(geometry), geometry)
    else:
        assert quant_configs(source_recipe(geometry), geometry)["decode"].of("lm_head") == WeightOnly(grid)


@pytest.mark.parametrize("name", ["gptq-zeros-act-order", "packed-int4-bf16"])
def test_a_bundle_is_built_with_them_by_default(made, name, tmp_path):
    manifest = build(BuildRequest(made(name)[-1], tmp_path / "bundle")).manifest
    assert (manifest.recipe.precision, manifest.recipe.head, manifest.recipe.scheme) == ("source", "int8", "rtn")
    # The reference has the same integers: only activations are rounded.
    assert manifest.quality.phases["decode"].mean_kl < 0.05
    assert not any("as integers" in note for note in manifest.notes)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"scheme": "gptq"}, "scheme is 'gptq', but the precision is source"),
        ({"smoothing": 0.5}, "smoothing is 0.5, but the precision is source"),
    ],
)
def test_what_would_change_them_is_refused(request_, words):
    with pytest.raises(UsageError, match=words):
        resolve(Request(**request_), capabilities("cpu"), 128, "x", coded=True)


def test_without_codes_there_are_none_to_keep():
    with pytest.raises(UsageError, check=about("precision")):
        resolve(Request(precision="source"), capabilities("cpu"), 128, "x")


def test_tensorrt_keeps_codes_without_zero_points_alone(case):
    scheme, _, folder = case
    geometry = read_export(folder).geometry
    recipe = source_recipe(geometry, "tensorrt")
    if scheme.grid.zeros:
        with pytest.raises(
            UsageError, match=r"takes no integers like those of .* with zero points\); build with --int"
        ):
            quant_configs(recipe, geometry)
    else:
        grid = Grid(scheme.grid.bits, scheme.grid.group, positive=True)
        assert quant_configs(recipe, geometry)["single"].of("model.layers.0.mlp.up_proj") == WeightOnly(grid)


@pytest.mark.parametrize("name", ["packed-int4-bf16", "int8-channel"])
@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_tensorrt_gets_the_same_codes_by_inputs(made, name, compute, tmp_path):
    scheme, written, folder = made(name)
    geometry, weights = read_export(folder).geometry, WeightFile(tmp_path)
    recipe = source_recipe(geometry, "tensorrt", compute=compute)
    stored = quant_configs(recipe, geometry)["single"]
    limits = Limits(128, 1, 128)
    context = LoweringContext("single", geometry, limits, stored, weights, Calibrated(), compute, compute)
    graph = ir.load(folder / DECODER_FILE).graph
    raise_linears(graph, context)
    linear = next(Linear.of(node) for node in graph if node.name == "model.layers.0.mlp.down_proj")
    codes, scales = integer_columns(linear, stored.of(linear.name).grid, context)
    weights.close()
    matrix, middle = written.matrices[linear.name], 1 << (scheme.grid.bits - 1)
    np.testing.assert_array_equal(codes.numpy().astype(np.int16) + middle, matrix.levels.T)
    np.testing.assert_array_equal(scales.numpy().reshape(matrix.scales.T.shape), matrix.scales.T.astype(compute))


def test_tensorrt_has_no_place_for_minima():
    geometry = uniform("llama", 1, 64, 64, 2, 2, 16, 96, 128, False, (0,))
    codes = Codes(4, 32, False, offsets=True)
    geometry = replace(geometry, linears=tuple(replace(linear, codes=codes) for linear in geometry.linears))
    with pytest.raises(UsageError, match=r"4 bits in blocks of 32 with minima\); build with --int4"):
        quant_configs(source_recipe(geometry, "tensorrt"), geometry)
