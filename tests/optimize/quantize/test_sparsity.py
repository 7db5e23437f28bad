"""Two of every four weights stay, those that matter most."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.optimize.quantize import sparsity

few_values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0])  # so that there are ties
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=few_values)


def transcribed(importance: np.ndarray) -> np.ndarray:
    """A weight is dropped if two others of its four beat it: by importance, or as an equal that comes before."""
    mask = np.ones(importance.shape, bool)
    for n, k in np.ndindex(importance.shape):
        start = k - k % 4
        if start + 4 <= importance.shape[1]:
            key = (-importance[n, k], k)
            mask[n, k] = sum((-importance[n, j], j) < key for j in range(start, start + 4)) < 2
    return mask


@settings(deadline=None, max_examples=150)
@given(matrices)
def test_magnitudes_decide_and_of_equals_the_first_stays(weights):
    got = sparsity.mask(torch.from_numpy(weights))
    assert got.dtype == torch.bool
    np.testing.assert_array_equal(got.numpy(), transcribed(np.abs(weights)))


@settings(deadline=None, max_examples=150)
@given(matrices, st.data())
def test_wanda_weighs_magnitudes_with_input_norms(weights, data):
    norms = data.draw(arrays.arrays(np.float32, weights.shape[1], elements=st.sampled_from([0.0, 0.5, 1.0, 4.0])))
    got = sparsity.mask(torch.from_numpy(weights), torch.from_numpy(norms))
    np.testing.assert_array_equal(got.numpy(), transcribed(np.abs(weights) * norms))


def test_exactly_two_of_four_stay_and_the_tail_stays_whole():
    mask = sparsity.mask(torch.zeros(3, 11))
    assert (mask[:, :8].reshape(3, 2, 4).sum(-1) == 2).all()
    assert mask[:, 8:].all()
