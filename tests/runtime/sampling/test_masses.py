"""The most probable tokens, against a stable sort."""

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime.sampling.masses import most_probable


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("k", [1, 2, 7, 100])
def test_most_probable_finds_what_a_stable_sort_finds(size, k):
    values = np.random.default_rng(size).integers(0, 50, size).astype(np.float32)  # with many equals
    wanted = np.argsort(-values, kind="stable")[:k]
    assert most_probable(values, k).tolist() == wanted.tolist()


@pytest.mark.parametrize("size", [5, 200, 5000])
def test_most_probable_leaves_out_what_is_forbidden(size):
    values = np.full(size, -np.inf, np.float32)
    values[[1, 4]] = [1, 2]
    assert most_probable(values, 3).tolist() == [4, 1]
    with pytest.raises(RequestError, match="are all -inf"):
        most_probable(np.full(size, -np.inf, np.float32), 3)
