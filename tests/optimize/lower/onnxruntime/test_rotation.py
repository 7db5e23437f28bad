"""The residual stream of the graph for prompts, rotated: in floats it computes what the portable graph computes."""

import pytest
from doubles.lowerings import difference

from llmc.optimize.lower.onnxruntime import rotation

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
# Norms behind products, and norms that subtract a mean.
UNROTATED = ("gemma2-softcaps", "olmo2-norms-behind", "cohere-parallel", "gpt2-scale-by-layer")


@pytest.mark.parametrize("case", ROTATED, indirect=True)
def test_a_rotated_stream_computes_the_same(case, lowering, decoder, portable_logits, ids):
    lowered = lowering(case.export, rotated=True)
    assert lowered.context.rotated
    run = decoder(lowered.save(), lowered.geometry)
    assert difference(run(ids), portable_logits(case)) <= ROTATION_TOLERANCE


@pytest.mark.parametrize("case", UNROTATED, indirect=True)
def test_a_stream_with_other_norms_is_not_rotated(case, lowering):
    assert not lowering(case.export, rotated=True).context.rotated


def test_a_planted_error_exceeds_the_tolerance(exported, lowering, decoder, portable_logits, ids, monkeypatch):
    case = exported("llama-biases")
    monkeypatch.setattr(rotation, "read_bias", lambda linear, context: context.calibrated.matrix(linear.biases))
    monkeypatch.setattr("llmc.optimize.lower.onnxruntime.linears.read_bias", rotation.read_bias)
    lowered = lowering(case.export, rotated=True)
    assert difference(decoder(lowered.save(), lowered.geometry)(ids), portable_logits(case)) > 100 * ROTATION_TOLERANCE
