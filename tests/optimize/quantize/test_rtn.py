"""Round to nearest with a clip search: never worse than plain rounding, close to the best scale there is."""

import numpy as np
import pytest
from doubles.grids import plain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmc.optimize.quantize import rtn
from llmc.optimize.quantize.grid import SMALLEST_SCALE, Grid, Quantized

# Two candidates are compared in float32, so the one with the larger error may win by this share of the squared weights.
FLOAT32_SHARE = 1e-6
# Mean square error over that of the best of 4,000 scales per group, on average over groups of normal weights: 1.042,
# 1.005 and 1.28 (where the best of 4,000 happens to meet the weights; four ratios cannot), on positive grids 1.017 and
# 1.001; plain rounding's is above.
SEARCH_TOLERANCE = {
    Grid(4, 32): 1.06,
    Grid(4, 128): 1.02,
    Grid(8, 32): 1.3,
    Grid(4, 32, positive=True): 1.02,
    Grid(4, 128, positive=True): 1.01,
}
# |<w - s q, q>| over <w, w>: rounding of the sums in float32.
NORMAL_EQUATION_TOLERANCE = 1e-5

SYMMETRIC = [Grid(4, 32), Grid(4, 128), Grid(8, 32), Grid(8)]
ASYMMETRIC = [Grid(grid.bits, grid.block, symmetric=False) for grid in SYMMETRIC]
POSITIVE = [Grid(grid.bits, grid.block, positive=True) for grid in SYMMETRIC]
GRIDS = [*SYMMETRIC, *ASYMMETRIC, *POSITIVE]


def squared_error(weights: np.ndarray, q: Quantized) -> np.ndarray:
    """Squared error [N] of each row in float64."""
    return np.square(weights.astype(np.float64) - q.dequantize().astype(np.float64)).sum(axis=1)


def normal(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


weight = st.floats(-4, 4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-6)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=weight)


@settings(deadline=None, max_examples=200)
@given(matrices, st.sampled_from(GRIDS))
def test_the_error_is_never_above_that_of_plain_rounding(weights, grid):
    slack = FLOAT32_SHARE * np.square(weights.astype(np.float64)).sum(axis=1)
    found, allowed = squared_error(weights, rtn.quantize(weights, grid)), squared_error(weights, plain(weights, grid))
    assert (found <= allowed + slack).all()


@settings(deadline=None, max_examples=200)
@given(matrices, st.sampled_from(GRIDS))
def test_every_scale_is_the_best_for_its_integers(weights, grid):
    q = rtn.quantize(weights, grid)
    assert worst_normal_equation(weights, q) <= NORMAL_EQUATION_TOLERANCE


def worst_normal_equation(weights: np.ndarray, q: Quantized) -> float:
    """The least-squares scale leaves an error that is orthogonal to the integers."""
    inputs = weights.shape[1]
    width = q.grid.width(inputs)
    worst = 0.0
    for group, start in enumerate(range(0, inputs, width)):
        w = weights[:, start : start + width].astype(np.float64)
        integers = q.values[:, start : start + width].astype(np.float64)
        if q.zero_points is not None:
            integers -= q.zero_points[:, [group]]
        rest = ((w - integers * q.scales[:, [group]]) * integers).sum(axis=1)
        size = np.linalg.norm(w, axis=1) * np.linalg.norm(integers, axis=1)
        worst = max(worst, float(np.divide(np.abs(rest), size, out=np.zeros_like(rest), where=size > 0).max()))
    return worst


def best_error(group: np.ndarray, grid: Grid) -> float:
    """The least squared error of any scale, by trying 2,000 of each sign that it may have in float64."""
    limit = np.abs(group).max() / grid.high * 1.2
    scales = np.linspace(limit / 4, limit, 2000)[:, None]
    scales = scales if grid.positive else np.concatenate([scales, -scales])
    integers = np.clip(np.rint(group / scales), grid.low, grid.high)
    fitted = (integers @ group) / np.square(integers).sum(axis=1)
    return float(np.square(group - integers * fitted[:, None]).sum(axis=1).min())


def error_over_the_best(quantize, grid: Grid) -> float:
    weights = normal((100, grid.block))
    best = sum(best_error(row.astype(np.float64), grid) for row in weights)
    return float(squared_error(weights, quantize(weights, grid)).sum()) / best


@pytest.mark.parametrize("grid", SEARCH_TOLERANCE, ids=str)
def test_the_search_is_close_to_the_best_scale(grid):
    assert error_over_the_best(rtn.quantize, grid) <= SEARCH_TOLERANCE[grid]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_group_of_zeros_has_scale_0_or_the_smallest_above_it(grid):
    weights = normal((3, 256))
    weights[1] = 0
    q = rtn.quantize(weights, grid)
    assert not q.values[1].any()
    assert (q.scales[1] == (SMALLEST_SCALE if grid.positive else 0)).all()
    assert (np.abs(q.scales[[0, 2]]) > SMALLEST_SCALE).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_zero_stays_exactly_zero(grid):
    weights = normal((4, 256)) + 0.01
    weights[:, ::3] = 0
    assert not rtn.quantize(weights, grid).dequantize()[:, ::3].any()


@pytest.mark.parametrize("exponent", [-110, 100])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_of_any_magnitude_round_alike(grid, exponent):
    weights = normal((4, 256))
    usual, unusual = rtn.quantize(weights, grid), rtn.quantize(np.ldexp(weights, exponent), grid)
    np.testing.assert_array_equal(unusual.values, usual.values)
    np.testing.assert_array_equal(unusual.scales, np.ldexp(usual.scales, exponent))


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(8, 32), Grid(8)], ids=str)
def test_weights_that_lie_on_the_grid_come_back_as_they_were(grid):
    rng = np.random.default_rng(0)
    integers = rng.integers(grid.low, grid.high + 1, (4, 64))
    integers[:, ::32] = grid.low
    scales = rng.choice([-1, 1], (4, grid.groups(64))) * 2.0 ** rng.integers(-9, -3, (4, grid.groups(64)))
    weights = (integers * np.repeat(scales, grid.width(64), axis=1)).astype(np.float32)
    np.testing.assert_array_equal(rtn.quantize(weights, grid).dequantize(), weights)


@pytest.mark.parametrize("grid", SEARCH_TOLERANCE, ids=str)
def test_plain_rounding_is_not_close_to_the_best_scale(grid):
    assert error_over_the_best(plain, grid) > SEARCH_TOLERANCE[grid]


@settings(deadline=None, max_examples=200)
@given(matrices, st.sampled_from(POSITIVE), st.sampled_from([-140, -100, 0, 100]))
def test_all_scales_of_a_positive_grid_are_above_zero(weights, grid, exponent):
    q = rtn.quantize(np.ldexp(weights, exponent), grid)
    assert (q.scales > 0).all() and np.isfinite(q.scales).all()


@pytest.mark.parametrize("grid", SYMMETRIC, ids=str)
def test_the_scale_of_plain_rounding_is_not_the_best_for_its_integers(grid):
    weights = normal((10, 256))
    assert worst_normal_equation(weights, plain(weights, grid)) > NORMAL_EQUATION_TOLERANCE
