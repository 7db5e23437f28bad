"""AWQ measures the error of real outputs, never loses by scaling, and its clip is the best it tried."""

import numpy as np
import pytest
import torch
from doubles.grids import plain

from llmc.optimize.calibrate.statistics import Accumulator
from llmc.optimize.quantize import awq, clip, rtn
from llmc.optimize.quantize.grid import SMALLEST_SCALE, Grid

# The same sum of squares by way of second moments and float32, and from inputs and outputs in float64.
ERROR_TOLERANCE = 1e-4

GRIDS = [Grid(4, 32), Grid(4), Grid(4, 32, False), Grid(8, 32), Grid(4, 32, positive=True), Grid(8, positive=True)]


def nearest(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """Weights rounded to nearest, in float64."""
    return plain(weights.astype(np.float32), grid).dequantize().astype(np.float64)


def real_error(layer, grid: Grid, scales: np.ndarray) -> float:
    """Mean square of (X / s) Q(W s)^T - X W^T, from inputs and outputs."""
    x, weights = layer.x.double().numpy(), layer.weights.double().numpy()
    got = (x / scales) @ nearest((layer.weights * torch.from_numpy(scales).float()).numpy(), grid).T
    return float(np.square(got - x @ weights.T).sum() / len(x))


def transcribed(layer, grid: Grid, steps: int) -> float:
    """The least error over the grid of alphas, with raw inputs and outputs, as in the authors' search."""
    magnitudes, weights = np.abs(layer.x.double().numpy()).mean(0), np.abs(layer.weights.double().numpy())
    magnitudes = np.maximum(magnitudes, 1e-4 * magnitudes.max())
    width = grid.width(96)
    largest = np.stack([weights[:, k - k % width : k - k % width + width].max(1) for k in range(96)], 1)
    shares = (weights / largest).mean(0)
    alphas = np.arange(steps) / steps
    tried = [magnitudes**alpha / shares ** ((1 - alpha) * power) for alpha in alphas for power in (0, 1)]
    errors = [real_error(layer, grid, scales / np.sqrt(scales.max() * scales.min())) for scales in tried]
    return min([real_error(layer, grid, np.ones(96)), *errors])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_search_finds_the_least_error_on_its_way(layer, grid):
    found = awq.search_scales([layer.weights], layer.statistics.mean_abs, layer.moment, [grid])
    error = real_error(layer, grid, found.double().numpy())
    assert error == pytest.approx(transcribed(layer, grid, awq.STEPS), rel=ERROR_TOLERANCE)


def test_inputs_that_were_never_seen_get_finite_scales():
    accumulator = Accumulator(32)
    accumulator.update(torch.zeros(5, 32))
    statistics = accumulator.finish()
    found = awq.search_scales([torch.randn(4, 32)], statistics.mean_abs, statistics.second_moment, [Grid(4, 32)])
    assert torch.equal(found, torch.ones(32))


# ------------------------------------------------------------------------------------------------------ the clip search


def best_of_ratios(layer, grid: Grid) -> np.ndarray:
    """Squared error of each group [N, groups] in the metric of its block, by trying every ratio in float64."""
    width = grid.width(96)
    best = np.full((24, grid.groups(96)), np.inf)
    for n, group in np.ndindex(best.shape):
        span = slice(group * width, group * width + width)
        w, block = layer.weights[n, span].double().numpy(), layer.moment[span, span].double().numpy()
        low, high = min(w.min(), 0), max(w.max(), 0)
        scale = w[np.abs(w).argmax()] / grid.low if grid.symmetric else (high - low) / (grid.high - grid.low)
        if grid.positive:
            scale = max(high / grid.high, low / grid.low)
        zero = 0 if grid.symmetric else np.clip(np.rint(grid.low - low / scale), grid.low, grid.high)
        for ratio in rtn.CLIP_RATIOS[grid.bits]:
            steps = np.clip(np.rint(w / (scale * ratio)), grid.low - zero, grid.high - zero)
            rest = w - steps * (steps @ block @ w) / (steps @ block @ steps)
            best[n, group] = min(best[n, group], rest @ block @ rest)
    return best


def block_errors(layer, dequantized: np.ndarray, grid: Grid) -> np.ndarray:
    width = grid.width(96)
    change, moment = dequantized.astype(np.float64) - layer.weights.double().numpy(), layer.moment.double().numpy()
    spans = [slice(start, start + width) for start in range(0, 96, width)]
    return np.stack([((change[:, s] @ moment[s, s]) * change[:, s]).sum(1) for s in spans], 1)


@pytest.mark.parametrize("grid", [*GRIDS, Grid(4, 64)], ids=str)
def test_the_clip_of_each_group_is_the_best_of_all_ratios(layer, grid):
    found = block_errors(layer, awq.quantize(layer.weights, layer.moment, grid).dequantize(), grid)
    np.testing.assert_allclose(found.sum(), best_of_ratios(layer, grid).sum(), rtol=ERROR_TOLERANCE * 10)


def test_steps_whose_best_scale_is_negative_explain_nothing_on_a_positive_grid():
    """The second weights round to 0; in the first row its part of the output is the larger one, of the other sign."""
    weights, moment = torch.tensor([[7.0, -0.2], [7.0, 0.2]]), torch.tensor([[1.0, 40.0], [40.0, 1601.0]])
    steps, scales, _ = clip.search(weights, moment, Grid(4, 2))
    assert ((steps * scales)[:, 0] * weights[:, 0]).sign().tolist() == [-1, 1]
    steps, scales, _ = clip.search(weights, moment, Grid(4, 2, positive=True))
    assert scales[0] == SMALLEST_SCALE and scales[1] > 1
    assert (steps >= 0).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_without_correlation_the_search_is_that_of_rounding_to_nearest(layer, grid):
    steps, scales, zeros = clip.search(layer.weights, torch.eye(96), grid)
    wanted = rtn.quantize(layer.weights.numpy(), grid)
    found = clip.quantized(steps, scales, zeros, grid)
    np.testing.assert_array_equal(found.values, wanted.values)
    np.testing.assert_allclose(found.scales, wanted.scales, rtol=ERROR_TOLERANCE)
    np.testing.assert_array_equal(found.zero_points, wanted.zero_points)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_clip_by_weights_is_not_the_best(layer, grid):
    found = block_errors(layer, rtn.quantize(layer.weights.numpy(), grid).dequantize(), grid)
    assert found.sum() > (1 + ERROR_TOLERANCE * 10) * best_of_ratios(layer, grid).sum()
