"""The lowered graph computes what the portable graph computes, however the tokens are fed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmc.optimize.lower.plan import Float32, Form, PerToken, WeightOnly
from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import Grid
from llmc.optimize.weights import rows_of

FLOAT_TOLERANCE = 1e-4

TOKENS = 20
PIECES = {"one piece": [TOKENS], "chunks": [7, 1, 12], "token by token": [1] * TOKENS}


def difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_float32_equals_the_portable_graph(case, lowering, decoder, portable_logits, ids, pieces):
    lowered = lowering(case.export)
    logits = decoder(lowered.save(), lowered.geometry)(ids, pieces)
    print("DIFF", case.name, pieces, difference(logits, portable_logits(case)), np.abs(logits).max())
    assert difference(logits, portable_logits(case)) <= FLOAT_TOLERANCE
