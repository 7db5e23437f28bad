"""Heads that GroupQueryAttention does not rotate are rotated before it; those that it has no kernel for are refused."""

from collections.abc import Callable
from typing import Any

import pytest
from doubles.lowerings import difference

from llmc.errors import BuildError
from llmc.optimize.build import build
from llmc.optimize.recipe import BuildRequest
from llmc.optimize.recipe.engine import EngineRequest

# As in test_lowering.py.
FLOAT_TOLERANCE = 1e-4
PIECES = [7, 1, 12]


@pytest.fixture(scope="module")
def rotated_apart(exported: Callable[..., Any]) -> Any:
    """A checkpoint whose heads are 24 wide, with a window."""
    return exported("qwen3-biases-window-in-first-layer", head_dim=24)


def test_heads_are_rotated_before_attention(rotated_apart, lowering, decoder, ids):
    lowered = lowering(rotated_apart.export)
    folder = lowered.save()
    assert {node.attributes["do_rotary"].as_int() for node in lowered.nodes("GroupQueryAttention")} == {0}
    assert len(lowered.nodes("RotaryEmbedding")) == 2 * lowered.geometry.layers
    got = decoder(folder, lowered.geometry)(ids, PIECES)
    assert difference(got, decoder(rotated_apart.export, lowered.geometry)(ids)) <= FLOAT_TOLERANCE


def test_heads_that_are_not_rotated_exceed_the_tolerance(rotated_apart, lowering, decoder, ids):
    lowered = lowering(rotated_apart.export).finish()
    for node in lowered.nodes("RotaryEmbedding"):
        node.outputs[0].replace_all_uses_with(node.inputs[0])
    got = decoder(lowered.write(), lowered.geometry)(ids, PIECES)
    assert difference(got, decoder(rotated_apart.export, lowered.geometry)(ids)) > 100 * FLOAT_TOLERANCE


def test_heads_without_a_kernel_are_refused_before_anything_is_built(exported, tmp_path):
    """TensorRT, as it is installed, fails inside of its attention."""
    export = exported("qwen3-tied-sharded", head_dim=20, num_hidden_layers=1).export
    for target in ("cpu", "cuda"):
        with pytest.raises(BuildError, match=r"self_attn has a head_dim of 20, .* a multiple of 8; build for cuda"):
            build(BuildRequest(export, tmp_path / "bundle", target=target))
    with pytest.raises(BuildError, match=r"head_dim of 20, .* takes multiples of 8; build for cuda with --fp32"):
        build(BuildRequest(export, tmp_path / "bundle", target="tensorrt-rtx", engine=EngineRequest(deferred=True)))
