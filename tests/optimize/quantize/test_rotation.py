"""Orthogonal matrices, and that they spread outliers."""

import numpy as np
import pytest

from llmc.optimize.quantize.rotation import hadamard, rotate_blocks, rotation

# Largest difference of Q Q^T from the identity: entries are rounded to float32, and products of a few thousand of them
# are added. Another sign anywhere costs more than 1 / size.
ORTHOGONAL_TOLERANCE = 1e-5


def distance(matrix: np.ndarray) -> float:
    return float(np.abs(matrix @ matrix.T - np.eye(len(matrix))).max())


@pytest.mark.parametrize("size", [1, 2, 33, 576, 896, 2048])
def test_it_is_orthogonal_and_the_same_each_time(size):
    assert distance(rotation(size)) <= ORTHOGONAL_TOLERANCE
    first = rotation(size).copy()
    rotation.cache_clear()
    np.testing.assert_array_equal(rotation(size), first)


def test_a_planted_error_exceeds_the_tolerance():
    wrong = rotation(576).copy()
    wrong[3, 4] *= -1
    assert distance(wrong) > 100 * ORTHOGONAL_TOLERANCE


@pytest.mark.parametrize("size", [576, 896, 1536, 2048, 3584])
def test_no_entry_is_much_larger_than_others(size):
    """So one outlier becomes at most 1.42 times the root mean square."""
    assert np.abs(rotation(size)).max() * np.sqrt(size) <= 1.42


def test_blocks_are_mixed_within_themselves_and_twice_is_once():
    x = np.zeros((1, 96), np.float32)
    x[0, 40] = 8
    mixed = rotate_blocks(x, 32)
    assert np.abs(mixed[0, 32:64]).min() > 1
    assert not mixed[0, :32].any()
    assert not mixed[0, 64:].any()
    np.testing.assert_allclose(rotate_blocks(mixed, 32), x, atol=1e-6)
    assert distance(hadamard(32)) <= ORTHOGONAL_TOLERANCE
