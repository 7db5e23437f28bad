"""int8 activations with a scale per token: the formulas, and that no token depends on the tokens beside it."""

from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import varied

from llmc.optimize.lower.context import PerToken

# Largest difference over the largest magnitude of a row. The integer product is exact, two or three factors are
# rounded to float32.
LINEAR_TOLERANCE = 1e-6
# Logits of the same graph with factors in another order or tokens in other chunks: 1e-6, but for the same reason up to
# 2e-2 in one prompt of a dozen. An error is in all of them, so the least of a few prompts counts.
ROUNDING_TOLERANCE = 5e-3

UNTIED, BIASES = "mistral-window-wide-heads", "llama-biases"
LAYER = "model.layers.0"
HIDDEN = 64


@pytest.fixture
def part(lowering, session):
    """Cuts a piece out of a lowered graph: activations [B, S, H] in, values by name out."""

    def cut(export, start: str, outputs: list[str], without: tuple[str, ...] = ()):
        lowered = lowering(export, PerToken())
        folder = lowered.save(without)
        model = ir.load(folder / "decoder.onnx")
        graph = ir.convenience.extract(model.graph, ["input_ids", start], outputs)
        graph.inputs[1].type, graph.inputs[1].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["B", "S", HIDDEN])
        (folder / "part").mkdir()
        part = ir.Model(graph, ir_version=model.ir_version)
        for tensor in (value.const_value for value in graph.initializers.values()):
            if isinstance(tensor, ir.ExternalTensor):
                graph.initializers[tensor.name].const_value = ir.tensor(tensor.numpy(), name=tensor.name)
        ir.save(part, folder / "part" / "part.onnx")
        opened = session(folder / "part" / "part.onnx")

        def run(x: np.ndarray) -> list[np.ndarray]:
            return opened.run(outputs, {"input_ids": np.zeros(x.shape[:2], np.int64), start: x})

        return run, {name: value.const_value.numpy() for name, value in graph.initializers.items()}

    return cut


def activations(rows: int = 20) -> np.ndarray:
    """Tokens [1, S, H] of very different magnitudes, as real ones are."""
    rng = np.random.default_rng(0)
    return (rng.normal(0, 1, (1, rows, HIDDEN)) * 10.0 ** rng.uniform(-3, 3, (1, rows, 1))).astype(np.float32)


def w8a8(x: np.ndarray, weight: np.ndarray, scales: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """x [M, K] times weight int8 [K, N] with scales [N], in float64: the formulas of the lowering."""
    tokens = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-9) / 127
    integers = np.clip(np.rint(x / tokens), -128, 127)
    return (integers @ weight.astype(np.float64)) * scales * tokens + bias


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest magnitude of the row."""
    assert a.shape == b.shape
    return float((np.abs(a - b).max(axis=1) / np.abs(b).max(axis=1)).max())


@pytest.fixture
def linear(exported, part):
    """The packed projection of a layer with biases: from its input to its output."""
    start = f"{LAYER}.input_layernorm.out"
    outputs = [f"{LAYER}.self_attn.qkv_proj.0", f"{LAYER}.self_attn.qkv_proj.input.QuantizeLinear.0"]
    run, constants = part(exported(BIASES).export, start, outputs)
    name = f"{LAYER}.self_attn.qkv_proj"
    return run, [constants[f"{name}.int8"], constants[f"{name}.int8.scales"], constants[f"{name}.bias.float32"]]


def test_a_linear_equals_its_formula(linear):
    run, (weight, scales, bias) = linear
    x = activations()
    assert difference(run(x)[0][0], w8a8(x[0].astype(np.float64), weight, scales, bias)) <= LINEAR_TOLERANCE


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6, 1e30])
def test_tokens_of_any_magnitude_stay_finite(linear, factor):
    run, _ = linear
    assert np.isfinite(run(activations() / 1000 * np.float32(factor))[0]).all()


def test_a_planted_error_exceeds_the_linear_tolerance(linear):
    run, (weight, scales, bias) = linear
    x = activations()[0].astype(np.float64)
    wrong = [(x * 1.00001, weight, scales), (x, weight + (weight == 5), scales), (x, weight, np.roll(scales, 1))]
    for factors in wrong:
        assert difference(run(activations())[0][0], w8a8(*factors, bias)) > LINEAR_TOLERANCE


@pytest.fixture(params=[(), ("defer token scales",)], ids=["deferred", "not deferred"])
def feed_forward(request, exported, part):
    """From the input of gate and up to the output of down."""
    return part(
        exported(UNTIED).export, f"{LAYER}.post_attention_layernorm.out", [f"{LAYER}.mlp.down_proj.out"], request.param
    )


def test_a_token_is_the_same_bit_for_bit_whatever_it_shares_a_call_with(feed_forward):
    run, _ = feed_forward
    x = activations(24)
    [whole] = run(x)
    for pieces in ([1] * 24, [7, 1, 16], [3, 21], [23, 1]):
        starts = np.cumsum([0, *pieces])
        parts = [run(x[:, start:stop])[0] for start, stop in pairwise(starts)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    for batch in (2, 3, 24):
        [rows] = run(x.reshape(batch, -1, HIDDEN))
        np.testing.assert_array_equal(rows.reshape(whole.shape), whole)


def prompts(ids: list[int]) -> list[list[int]]:
    return [ids, ids[::-1], [*ids[7:], *ids[:7]]]


@varied
def test_deferred_scales_change_nothing_but_the_rounding(case, lowering, decoder, ids):
    early, late = lowering(case.export, PerToken()), lowering(case.export, PerToken())
    wanted = decoder(early.save(without=["defer token scales"]), early.geometry)
    got = decoder(late.save(), late.geometry)
    assert min(difference(got(prompt), wanted(prompt)) for prompt in prompts(ids)) <= ROUNDING_TOLERANCE


def test_a_planted_error_exceeds_the_rounding_tolerance(exported, lowering, decoder, ids):
    early, late = (lowering(exported(UNTIED).export, PerToken()) for _ in range(2))
    wanted = decoder(early.save(without=["defer token scales"]), early.geometry)
    late.apply("remove dead nodes")
    deferred = late.node(f"{LAYER}.mlp.down_proj.Mul.scales.Mul")
    deferred.outputs[0].replace_all_uses_with(deferred.inputs[0])
    got = decoder(late.write(), late.geometry)
    assert min(difference(got(prompt), wanted(prompt)) for prompt in prompts(ids)) > ROUNDING_TOLERANCE
