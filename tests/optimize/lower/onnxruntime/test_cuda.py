"""The CUDA target's graph, run by ONNX Runtime on the CPU, computes what the portable graph computes.

Nothing here runs on a GPU: that every operator has a CUDA kernel is read from ONNX Runtime's documentation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from doubles.lowerings import Lowering, difference, portable, relative_difference, varied
from doubles.modules import random_checkpoints

from llmc.bundle import Limits, Recipe
from llmc.bundle.model.names import SENSITIVE
from llmc.errors import BuildError
from llmc.optimize import passes
from llmc.optimize.lower.context import (
    Computed,
    Float16,
    Float32,
    LoweringContext,
    QuantConfig,
    QuantConfigs,
    Static,
    WeightOnly,
    quant_configs,
)
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.recipe import Request, resolve
from llmc.optimize.targets import OLD, capabilities
from llmc.optimize.weights.store import Calibrated

# Largest absolute difference of logits (up to 9) in float32, as the target promises it: sums in another order cost up
# to 1e-5 here. A mask, a rotation or a row of the wrong place costs more than 1e-2.
FLOAT32_TOLERANCE = 2e-4
# Root mean square of the difference over that of the logits where all arithmetic is in float16, whose unit of rounding
# is 4.9e-4: two layers of random weights turn that into 1.3e-3 to 2.6e-3. The planted errors cost more than 5e-2.
FLOAT16_TOLERANCE = 8e-3

BIASES, WINDOW, QK_NORM = "llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded"
# Products of different shapes: packed or not, with biases, tied heads, and MLPs of one matrix or two.
DIFFERENT = (
    BIASES,
    WINDOW,
    QK_NORM,
    "phi3-packed-window-fp16",
    "gemma2-softcaps",
    "cohere-parallel",
    "gpt2-scale-by-layer",
)
CAPACITY = 24
PIECES = {"whole": [20], "chunks": [7, 1, 12], "steps": [1] * 20, "draft": [9, 1, 1, 4, 1, 4]}
FLOAT16_FORMS = [
    Float16(),
    Computed(),
    Float32(),
    WeightOnly(Grid(8, 32)),
    WeightOnly(Grid(8, 128)),
    WeightOnly(Grid(4, 32)),
    WeightOnly(Grid(4, 32, False)),
]


class Lowered(Lowering):
    """An export on its way through the passes of the CUDA target."""

    def __init__(self, export: Path, folder: Path, form: QuantConfig | Recipe, compute: str) -> None:
        folder.mkdir()
        opsets = {"": OLD[0], "com.microsoft": 1}
        super().__init__(export, folder, passes.PASSES["cuda"], opsets, OLD[1])
        asked = isinstance(form, Recipe)
        forms = quant_configs(form, self.geometry)["shared"] if asked else QuantConfigs(form, form)
        limits = Limits(CAPACITY, 4, CAPACITY)
        self.context = LoweringContext(
            "shared", self.geometry, limits, forms, self.weights, Calibrated(), compute, compute
        )

    def lower(self) -> "Lowered":
        passes.lower(self.model, "cuda", self.context)
        self.weights.close()  # so that what was written can be read
        return self


@pytest.fixture
def lowered(tmp_path: Path) -> Callable[..., Lowered]:
    started: list[Lowered] = []

    def start(export: Path, form: QuantConfig | Recipe, compute: str) -> Lowered:
        started.append(Lowered(export, tmp_path / f"lowered-{len(started)}", form, compute))
        return started[-1]

    yield start
    for each in started:
        each.weights.close()


@pytest.mark.parametrize("case", random_checkpoints().DENSE, indirect=True)
def test_float32_equals_the_portable_graph(case, lowered, decoder, portable_logits, ids):
    lowering = lowered(case.export, Float32(), "float32").lower()
    run = decoder(lowering.write(), lowering.geometry)
    for pieces in PIECES.values():
        assert difference(run(ids, pieces), portable_logits(case)) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("form", FLOAT16_FORMS, ids=str)
@pytest.mark.parametrize("name", [BIASES, QK_NORM])
def test_float16_equals_the_portable_graph_up_to_its_rounding(exported, lowered, decoder, ids, tmp_path, name, form):
    lowering = lowered(exported(name).export, form, "float16").lower()
    wanted = decoder(portable(lowering, tmp_path / "portable"), lowering.geometry)(ids)
    run = decoder(lowering.write(), lowering.geometry, "float16")
    for pieces in PIECES.values():
        assert relative_difference(run(ids, pieces), wanted) <= FLOAT16_TOLERANCE


@varied
@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_rows_of_different_lengths_decode_together(case, lowered, decoder, ids, compute):
    """Each row is prefilled alone, as the session does it; then all take a step of one token in one call."""
    lowering = lowered(case.export, Computed(), compute).lower()
    decode, lengths = decoder(lowering.write(), lowering.geometry, compute), [9, 4, 1]
    rows = [decode.run([ids[:length]], [0], decode.empty_cache())[1] for length in lengths]
    together = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    logits, _ = decode.run([[ids[length]] for length in lengths], lengths, together)
    alone = [decode.run([[ids[n]]], [n], row)[0][0] for n, row in zip(lengths, rows, strict=True)]
    assert relative_difference(logits, np.stack(alone)) <= FLOAT16_TOLERANCE


def scales_of_another_block(lowering: Lowered) -> None:
    name = next(name for name in lowering.graph.initializers if "layers.0.mlp.down" in name and "scales" in name)
    value = lowering.graph.initializers[name]
    value.const_value = ir.tensor(np.roll(value.const_value.numpy(), 1), name=name)


def positions_one_too_far(lowering: Lowered) -> None:
    for name in ("rotary_emb.0.cos", "rotary_emb.0.sin"):
        value = lowering.graph.initializers[name]
        turned = np.concatenate([value.const_value.numpy()[:1], value.const_value.numpy()[:-1]])
        value.const_value = ir.tensor(turned, name=name)


def window_one_too_wide(lowering: Lowered) -> None:
    for node in lowering.nodes("GroupQueryAttention"):
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 7)
    for node in lowering.nodes("Sub"):
        if node.inputs[1].name == "const.int64.6":
            node.replace_input_with(1, lowering.graph.initializers["const.int64.1"])


def logits_of_the_first_token(lowering: Lowered) -> None:
    [gather] = [node for node in lowering.nodes("Gather") if node.name == "logit_rows"]
    zeros = ir.node("Sub", [gather.inputs[1], gather.inputs[1]])
    zeros.name = zeros.outputs[0].name = "zeros"
    gather.prepend(zeros)
    gather.replace_input_with(1, zeros.outputs[0])


PLANTED = [
    (Float16(), "float16", positions_one_too_far),
    (Float16(), "float16", window_one_too_wide),
    (Float16(), "float16", logits_of_the_first_token),
    (WeightOnly(Grid(8, 32)), "float16", scales_of_another_block),
    (WeightOnly(Grid(4, 32)), "float16", scales_of_another_block),
    (Float32(), "float32", positions_one_too_far),
    (Float32(), "float32", window_one_too_wide),
    (Float32(), "float32", logits_of_the_first_token),
]


@pytest.mark.parametrize(("form", "compute", "plant"), PLANTED)
def test_a_planted_error_exceeds_the_tolerances(exported, lowered, decoder, ids, tmp_path, form, compute, plant):
    lowering = lowered(exported(WINDOW).export, form, compute).lower()
    wanted = decoder(portable(lowering, tmp_path / "portable"), lowering.geometry)(ids)
    plant(lowering)
    found = decoder(lowering.write(), lowering.geometry, compute)(ids)
    assert difference(found, wanted) > FLOAT32_TOLERANCE
    assert relative_difference(found, wanted) > FLOAT16_TOLERANCE


# Operators of the standard domain with the versions of their CUDA kernels, from docs/OperatorKernels.md of ONNX
# Runtime: a kernel without an end matches its own version only, so an operator that the opset has changed since runs
# on the CPU, with copies around it.
KERNELS: dict[str, tuple[int, int]] = {
    "Add": (14, 14),
    "And": (7, 7),
    "Cast": (21, 22),
    "CumSum": (14, 14),
    "Div": (14, 14),
    "Exp": (13, 13),
    "Expand": (13, 13),
    "Gather": (13, 13),
    "Gelu": (20, 20),
    "Greater": (13, 13),
    "LayerNormalization": (17, 17),
    "LessOrEqual": (16, 16),
    "MatMul": (13, 13),
    "Mul": (14, 14),
    "Range": (11, 11),
    "ReduceSum": (13, 13),
    "Relu": (14, 14),
    "Reshape": (21, 22),
    "ScatterElements": (18, 18),
    "Shape": (21, 22),
    "Slice": (13, 13),
    "Softmax": (13, 13),
    "Split": (18, 18),
    "Squeeze": (21, 22),
    "Sub": (14, 14),
    "Tanh": (13, 13),
    "TopK": (11, 23),
    "Transpose": (21, 22),
    "Unsqueeze": (21, 22),
    "Where": (16, 16),
}
# The same for the other domain, and for a name that ONNX Runtime added to the standard one.
CONTRIBUTED = {
    "FusedMatMul",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "QuickGelu",
    "RotaryEmbedding",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}
EMITTED = [(Computed(), "float16"), (Computed(), "float32"), (WeightOnly(Grid(4, 32)), "float16")]
# In float32 the CUDA provider has none.
ONLY_FLOAT16 = {"GroupQueryAttention"}


@varied
@pytest.mark.parametrize(("form", "compute"), EMITTED, ids=str)
def test_every_operator_has_a_cuda_kernel_and_no_value_goes_from_the_host_to_the_device(case, lowered, form, compute):
    """But into arguments that kernels take from the host: Shape is computed there; ONNX Runtime would put a copy in
    front of any other reader, and record nothing."""
    lowering, opset = lowered(case.export, form, compute).lower(), OLD[0]
    on_the_host = {("GroupQueryAttention", 6), ("Range", 1), ("Expand", 1)}
    for node in lowering.graph:
        if node.op_type in CONTRIBUTED:
            assert compute == "float16" or node.op_type not in ONLY_FLOAT16
            continue
        if node.op_type == "Constant":  # becomes an initializer before kernels are looked for
            continue
        first, last = KERNELS[node.op_type]
        assert first <= onnx.defs.get_schema(node.op_type, opset).since_version <= last, node.op_type
    for shape in lowering.nodes("Shape"):
        readers = list(shape.outputs[0].uses())
        while readers:
            node, index = readers.pop()
            if node.op_type in ("Cast", "Squeeze"):  # of a number on the host: done there
                readers += node.outputs[0].uses()
            else:
                assert (node.op_type, index) in on_the_host


def list_slow_products(lowering: Lowered) -> list[str]:
    """Products with integer weights for which ONNX Runtime's fast kernels are not made: CheckFpAIntBEligibility of its
    matmul_nbits.cc, as the published wheel is built."""
    slow = []
    for node in lowering.nodes("MatMulNBits"):
        size, inputs, outputs, bits = (node.attributes[key].as_int() for key in ("block_size", "K", "N", "bits"))
        terms = [value for value in node.inputs[3:] if value is not None]  # zero points, order of inputs, bias
        floats = {node.inputs[2].dtype, node.inputs[2].const_value.dtype}
        takes = bits in (4, 8) and size == 32 and inputs % 32 == 0 and outputs % {4: 64, 8: 32}[bits] == 0
        if not takes or terms or floats != {ir.DataType.FLOAT16} or "weight_prepacked" in node.attributes:
            slow.append(f"{node.name} [{outputs}, {inputs}]")
    return slow


def cuda_recipe(**asked: Any) -> Recipe:
    return resolve(Request(**asked), capabilities("cuda"), 128, "test")[0]


@pytest.mark.parametrize("case", DIFFERENT, indirect=True)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_every_product_with_integer_weights_has_a_fast_kernel(case, lowered, precision):
    """The head's, too. An MLP of 96 that is not packed with another is no multiple of 64, as real ones are."""
    lowering = lowered(case.export, cuda_recipe(precision=precision), "float16").lower()
    assert len(lowering.nodes("MatMulNBits")) > 6
    assert [name for name in list_slow_products(lowering) if precision == "int8" or "[96, 64]" not in name] == []


@pytest.mark.parametrize(
    "asked",
    [
        {"precision": "int4", "symmetric": False},
        {"precision": "int4", "block_size": 64},
        {"precision": "int8", "block_size": 128},
        {"precision": "int4", "compute": "float32"},
    ],
    ids=str,
)
def test_what_has_no_fast_kernel_is_noticed(exported, lowered, asked):
    recipe = cuda_recipe(**asked)
    assert list_slow_products(lowered(exported(BIASES).export, recipe, recipe.compute).lower())


@pytest.mark.parametrize("layers", [{SENSITIVE: "int8"}, {"*.v_proj": "int8", "*.0.mlp.*": "fp16"}], ids=str)
def test_layers_in_other_precisions_leave_the_fast_kernels_to_the_rest(exported, lowered, layers):
    recipe = cuda_recipe(precision="int4", layers=layers)
    lowering = lowered(exported(WINDOW).export, recipe, "float16").lower()
    assert {node.attributes["bits"].as_int() for node in lowering.nodes("MatMulNBits")} == {4, 8}
    assert list_slow_products(lowering) == []


def test_fuse_skip_norms_leaves_a_norm_of_something_else(exported, lowered):
    lowering = lowered(exported(WINDOW).export, Float32(), "float32").before("fuse skip norms")
    norm = lowering.nodes("SimplifiedLayerNormalization")[1]
    between = ir.node("Identity", [norm.inputs[0]])
    between.name = between.outputs[0].name = "between"
    norm.prepend(between)
    norm.replace_input_with(0, between.outputs[0])
    assert lowering.apply("fuse skip norms") == 2


def test_a_graph_whose_logits_have_another_name_has_nothing_to_rank(exported, lowered):
    lowering = lowered(exported(WINDOW).export, Float32(), "float32").before("rank logits")
    [logits] = [value for value in lowering.graph.outputs if value.name == "logits"]
    logits.name = "scores"
    assert lowering.apply("rank logits") == 0
    assert not lowering.nodes("TopK")


@pytest.mark.parametrize("form", [Static(), WeightOnly(Grid(8))], ids=str)
def test_a_form_without_a_kernel_is_refused_by_name(exported, lowered, form):
    with pytest.raises(BuildError, match=r"qkv_proj|q_proj is to be stored as .*; expected fp32, fp16, int8 or int4"):
        lowered(exported(WINDOW).export, form, "float16").lower()
