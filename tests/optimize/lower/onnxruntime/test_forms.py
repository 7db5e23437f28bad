"""Each form of weights computes what the portable graph computes on the weights that it stands for."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from doubles.lowerings import difference, portable, varied

from llmc.bundle import DECODER_FILE
from llmc.errors import BuildError
from llmc.optimize.lower.context import Float16, Float32, WeightOnly
from llmc.optimize.quantize.grid import Grid

# Largest absolute difference of logits (up to 9) in float32: sums run in another order, which costs up to 1.5e-5. A
# zero point, a block or a part of the wrong place costs more than 1e-3.
FLOAT_TOLERANCE = 1e-4

BIASES, UNTIED, TIED, HALF = "llama-biases", "mistral-window-wide-heads", "qwen3-tied-sharded", "qwen2-tied-bf16"
LAYER = "model.layers.0"
PIECES = [7, 1, 12]
FOUR, EIGHT = WeightOnly(Grid(4, 32)), WeightOnly(Grid(8, 32))


def compared(lowered, decoder, ids: list[int], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the lowered graph with exact arithmetic, and those of the portable one."""
    lowered.exact()
    found = decoder(lowered.write(), lowered.geometry)(ids, PIECES)
    return found, decoder(portable(lowered, folder / "portable"), lowered.geometry)(ids)


@varied
def test_float16_equals_the_portable_graph_on_rounded_weights(case, lowering, decoder, ids, tmp_path):
    lowered = lowering(case.export, Float16())
    lowered.apply("remove dead nodes")
    found, wanted = compared(lowered, decoder, ids, tmp_path)
    assert difference(found, wanted) <= FLOAT_TOLERANCE


def test_a_weight_beyond_float16_is_refused_by_name(source, lowering):
    tensor = ir.load(source / DECODER_FILE).graph.initializers[f"{LAYER}.mlp.up_proj.weight"].const_value
    with (source / tensor.location).open("r+b") as file:
        file.seek(tensor.offset + 40)
        file.write(np.float32(70_000).tobytes())
    with pytest.raises(BuildError, match=rf"{LAYER}.mlp.up_proj.weight holds weights beyond float16's 65504; keep it"):
        lowering(source, Float16()).save()


@pytest.mark.parametrize("grid", [Grid(4, 32, False), Grid(8, 32, False), Grid(4, 128, False)], ids=str)
@pytest.mark.parametrize("name", [BIASES, UNTIED, TIED, HALF])
def test_zero_points_equal_the_portable_graph(exported, lowering, decoder, ids, tmp_path, name, grid):
    """In linears, and in the rows of a tied embedding; 96 inputs make an odd number of blocks of 32."""
    lowered = lowering(exported(name).export, WeightOnly(grid))
    lowered.apply("remove dead nodes")
    found, wanted = compared(lowered, decoder, ids, tmp_path)
    assert difference(found, wanted) <= FLOAT_TOLERANCE


def zeros_left_out_of_linears(lowered) -> None:
    for node in lowered.nodes("MatMulNBits"):
        node.replace_input_with(3, None)


def zeros_left_out_of_rows(lowered) -> None:
    lowered.nodes("GatherBlockQuantized")[0].replace_input_with(3, None)


@pytest.mark.parametrize("plant", [zeros_left_out_of_linears, zeros_left_out_of_rows])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_planted_error_exceeds_the_float_tolerance(exported, lowering, decoder, ids, tmp_path, plant, bits):
    lowered = lowering(exported(TIED).export, WeightOnly(Grid(bits, 32, False)))
    lowered.apply("remove dead nodes")
    lowered.weights.close()  # so that what was written can be read
    plant(lowered)
    found, wanted = compared(lowered, decoder, ids, tmp_path)
    assert difference(found, wanted) > FLOAT_TOLERANCE


MIXED = {
    "the projections of attention": {"*.q_proj": EIGHT, "*.k_proj": Float32(), "*.v_proj": Float16()},
    "one of three": {"*.v_proj": EIGHT},
    "a layer in float": {"model.layers.1.*": Float32()},
    "the down projections": {"*.mlp.down_proj": WeightOnly(Grid(8, 64, False))},
    "the head": {"lm_head": Float16(), "*.o_proj": EIGHT},
}


@pytest.mark.parametrize("layers", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("name", [BIASES, TIED])
def test_forms_by_pattern_equal_the_portable_graph(exported, lowering, decoder, ids, tmp_path, name, layers):
    lowered = lowering(exported(name).export, FOUR, layers=layers)
    lowered.apply("remove dead nodes")
    found, wanted = compared(lowered, decoder, ids, tmp_path)
    assert difference(found, wanted) <= FLOAT_TOLERANCE
