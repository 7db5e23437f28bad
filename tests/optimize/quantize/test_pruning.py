"""Of every row the weights that matter least become zero: by magnitude, or weighed with what they read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.bundle import TWO_OF_FOUR
from llmc.optimize.quantize.pruning import Pruning, keep_mask

few_values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0])  # so that there are ties
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=few_values)
norms_of = {"magnitude": st.just(1.0), "wanda": st.sampled_from([0.0, 0.5, 1.0, 4.0])}


def transcribe(importance: np.ndarray, pattern: str) -> np.ndarray:
    """A weight stays if fewer others of its group beat it than stay: by importance, or as an equal that comes first."""
    rows, inputs = importance.shape
    width, kept = (4, 2) if pattern == TWO_OF_FOUR else (inputs, inputs - int(float(pattern) * inputs))
    mask = np.ones((rows, inputs), bool)
    for n, k in np.ndindex(rows, inputs):
        group = range(k - k % width, k - k % width + width)
        if group.stop <= inputs:
            mask[n, k] = sum((-importance[n, j], j) < (-importance[n, k], k) for j in group) < kept
    return mask


@pytest.mark.parametrize("pattern", [TWO_OF_FOUR, "0.5", "0.3"])
@pytest.mark.parametrize("rule", norms_of)
@settings(deadline=None, max_examples=50)
@given(matrices, st.data())
def test_the_least_important_go_and_of_equals_the_first_stays(pattern, rule, weights, data):
    norms = data.draw(arrays.arrays(np.float32, weights.shape[1], elements=norms_of[rule]))
    found = keep_mask(weights, pattern, None if rule == "magnitude" else norms)
    np.testing.assert_array_equal(found, transcribe(np.abs(weights) * norms, pattern))


def test_two_of_four_leaves_the_rest_of_a_row():
    mask = keep_mask(np.zeros((3, 11), np.float32), TWO_OF_FOUR)
    assert (mask[:, :8].reshape(3, 2, 4).sum(-1) == 2).all()
    assert mask[:, 8:].all()


def test_a_tensor_that_is_not_named_stays_whole():
    rows = np.ones((2, 4), np.float32)
    pruning = Pruning("0.5", {"a"})
    np.testing.assert_array_equal(pruning.prune("b", rows, None), rows)
    np.testing.assert_array_equal(pruning.prune("a", rows, np.array([1, 9, 9, 1], np.float32)), [[0, 1, 1, 0]] * 2)
