"""Activations of int8 with one scale, known before they are seen."""

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import relative_difference

from llmc.bundle import DECODER_FILE
from llmc.errors import BuildError
from llmc.optimize.lower.context import QuantConfig, Static, WeightOnly
from llmc.optimize.quantize.grid import Grid

# Root mean square of the difference over that of the logits. Both graphs round the same activations with the same
# scales: in float32 they agree to 1e-7, unless a sum in another order puts an activation on the other side of a step.
FLOAT_ROUNDING_TOLERANCE = 0.02
# In float16 many activations fall to the other side, and two layers of random weights turn those steps into up to 5 %.
# Wrong scales cost more than 20 %.
HALF_ROUNDING_TOLERANCE = 0.1
TOLERANCES = {"float32": FLOAT_ROUNDING_TOLERANCE, "float16": HALF_ROUNDING_TOLERANCE}
SOME = ("llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded")
HEAD, STATIC = WeightOnly(Grid(8, positive=True)), Static(Grid(8, positive=True))
WEIGHTS: dict[str, tuple[QuantConfig, QuantConfig]] = {"int8": (STATIC, HEAD), "int8 head too": (STATIC, STATIC)}
LAYER = "model.layers.0"


def rounding_activations(folder, lowered) -> None:
    """Let the portable decoder in ``folder`` round the inputs of its linears in plain arithmetic."""
    model = ir.load(folder / DECODER_FILE)
    graph, plan = model.graph, lowered.context
    for node in [node for node in graph if node.op_type == "MatMul"]:
        form = plan.quant.of(node.name)
        if isinstance(form, Static):
            rounded = _rounded(node, node.inputs[0], plan.calibrated.activation(node.name))
            node.replace_input_with(0, rounded)
    ir.save(model, folder / DECODER_FILE)


def _rounded(node: ir.Node, x: ir.Value, largest: float) -> ir.Value:
    def emit(op: str, *inputs: ir.Value, **attributes) -> ir.Value:
        made = ir.node(op, list(inputs), attributes)
        made.name = made.outputs[0].name = f"{node.name}.input.{op}.{len(list(node.graph))}"
        node.prepend(made)
        return made.outputs[0]

    def number(value: float) -> ir.Value:
        return emit("Constant", value=ir.tensor(np.float32(value)))

    scale = number(largest / 127)
    steps = emit("Clip", emit("Round", emit("Div", x, scale)), number(-128), number(127))
    return emit("Mul", steps, scale)


@pytest.fixture
def lowered_and_wanted(exported, lowering, ranges, decoder, portable, ids):
    """A case lowered with static scales, and the logits of the portable graph with the same weights and roundings."""

    def start(name: str, weights: str, compute: str = "float32"):
        case = exported(name)
        body, head = WEIGHTS[weights]
        lowered = lowering(case.export, body, head, compute=compute, calibrated=ranges(case.export)).finish()
        folder = portable(lowered)
        rounding_activations(folder, lowered)
        return lowered, decoder(folder)(ids)

    return start


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_static_scales_equal_the_portable_graph_that_rounds_so(
    lowered_and_wanted, decoder, ids, name, weights, compute
):
    lowered, wanted = lowered_and_wanted(name, weights, compute)
    assert relative_difference(decoder(lowered.write())(ids, [7, 1, 12]), wanted) <= TOLERANCES[compute]


@pytest.mark.parametrize("factor", [0.1, 8.0])
def test_wrong_scales_exceed_the_tolerance(lowered_and_wanted, decoder, ids, factor):
    """Too small a scale clips; too large a one has too few steps."""
    lowered, wanted = lowered_and_wanted("llama-biases", "int8")
    for name, value in lowered.graph.initializers.items():
        if name.endswith(".input.scale"):
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(factor), name=name)
    assert relative_difference(decoder(lowered.write())(ids), wanted) > max(TOLERANCES.values())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_activation_is_rounded_once_for_all_linears_that_read_it(exported, lowering, ranges, weights):
    case = exported("qwen3-tied-sharded")
    body, head = WEIGHTS[weights]
    lowered = lowering(case.export, body, head, calibrated=ranges(case.export)).finish()
    # q, k and v together, o, gate and up together, down, and the head if it has static scales too.
    assert len(lowered.nodes("QuantizeLinear")) == 4 * 2 + (head == STATIC)
    for node in lowered.nodes("QuantizeLinear"):
        scale, zero = (value.const_value.numpy() for value in node.inputs[1:])
        assert scale.shape == zero.shape == () and scale > 0 and float(zero) == 0


def test_an_activation_that_was_only_seen_as_zero_has_a_scale_that_float16_holds(exported, lowering):
    lowered = lowering(exported("llama-biases").export, STATIC, HEAD, compute="float16")
    lowered.context.calibrated.activation = lambda module: 0.0
    scales = [node.inputs[1].const_value.numpy() for node in lowered.finish().nodes("QuantizeLinear")]
    assert {scale.dtype for scale in scales} == {np.dtype(np.float16)}
    assert min(scales) > 0


def test_a_range_that_calibration_did_not_see_is_refused_by_name(exported, lowering):
    with pytest.raises(BuildError, match=rf"{LAYER}.self_attn.q_proj: calibration holds no input:{LAYER}"):
        lowering(exported("llama-biases").export, STATIC, HEAD).finish()
