"""The residual stream of the graph for prompts, rotated: in floats it computes what the portable graph computes."""

import pytest
from doubles.lowerings import difference, relative_difference

from llmc.optimize.lower.context import WeightOnly
from llmc.optimize.lower.onnxruntime import rotation
from llmc.optimize.quantize.grid import Grid

# Largest absolute difference of logits (up to 9): Q and its products with weights are rounded to float32, which costs
# up to 2e-5 here. A weight of a norm that is left out costs more than 0.1.
ROTATION_TOLERANCE = 1e-4

ROTATED = (
    "llama-biases",
    "llama-llama3-rope-tied",
    "phi3-packed-window-fp16",
    "smollm3-every-second-layer-rotated",
    "hunyuan-norm-after-rope",
    "granite-multipliers",
    "gemma-bf16",
)
# Root mean square of the difference over that of the logits, with weights in 8 bits: roundings in another basis. A
# block that is mixed on one side only costs more than 0.5. Of gemma, whose norms' weights are one larger, 0.11.
ROUNDING_TOLERANCE = 0.15
# Norms behind products, and norms that subtract a mean.
UNROTATED = ("gemma2-softcaps", "olmo2-norms-behind", "cohere-parallel", "gpt2-scale-by-layer")


@pytest.mark.parametrize("case", ROTATED, indirect=True)
def test_a_rotated_stream_computes_the_same(case, lowering, decoder, portable_logits, ids):
    lowered = lowering(case.export, rotated=True)
    assert lowered.context.rotated
    run = decoder(lowered.save(), lowered.geometry)
    assert difference(run(ids), portable_logits(case)) <= ROTATION_TOLERANCE


@pytest.mark.parametrize("case", ROTATED, indirect=True)
def test_a_rotated_stream_of_integers_computes_the_same_up_to_rounding(case, lowering, decoder, portable_logits, ids):
    lowered = lowering(case.export, WeightOnly(Grid(8, 32)), rotated=True)
    assert {"MatMul", "MatMulNBits"} <= {node.op_type for node in lowered.finish().graph}
    run = decoder(lowered.write(), lowered.geometry)
    assert relative_difference(run(ids), portable_logits(case)) <= ROUNDING_TOLERANCE


def test_unmixed_weights_exceed_the_rounding_tolerance(exported, lowering, decoder, portable_logits, ids, monkeypatch):
    case = exported("llama-biases")
    monkeypatch.setattr("llmc.optimize.lower.onnxruntime.rotation.rotate_blocks", lambda matrix, block: matrix)
    lowered = lowering(case.export, WeightOnly(Grid(8, 32)), rotated=True)
    run = decoder(lowered.save(), lowered.geometry)
    assert relative_difference(run(ids), portable_logits(case)) > 3 * ROUNDING_TOLERANCE


@pytest.mark.parametrize("case", UNROTATED, indirect=True)
def test_a_stream_with_other_norms_is_not_rotated(case, lowering):
    assert not lowering(case.export, rotated=True).context.rotated


def test_a_planted_error_exceeds_the_tolerance(exported, lowering, decoder, portable_logits, ids, monkeypatch):
    case = exported("llama-biases")
    monkeypatch.setattr(rotation, "read_bias", lambda linear, context: context.calibrated.matrix(linear.biases))
    monkeypatch.setattr("llmc.optimize.lower.onnxruntime.linears.read_bias", rotation.read_bias)
    lowered = lowering(case.export, rotated=True)
    assert difference(decoder(lowered.save(), lowered.geometry)(ids), portable_logits(case)) > 100 * ROTATION_TOLERANCE
