"""GPTQ is the paper's algorithm, beats rounding to nearest, and keeps zeros."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmc.errors import BuildError
from llmc.optimize.quantize import awq, clip, gptq, rtn
from llmc.optimize.quantize.grid import SMALLEST_SCALE, Grid, Quantized

# Output error over that of the transcription. In float32 an integer near a tie may fall to the other side; one such
# integer in 2,304 changes the error by less than this.
ERROR_TOLERANCE = 0.005
# Share of integers that agree with the transcription, for the same reason.
SAME_INTEGERS = 0.995
# Output error over that of rounding to nearest with clip, on correlated inputs; measured 0.2 ... 0.45.
GAIN_TOLERANCE = 0.6
# Output error with a mask over that with weights pruned before, where no other weight makes up for them; measured 0.62.
MASK_TOLERANCE = 0.75
# Output error on a positive grid over that of integers chosen with scales of either sign, whose signs are turned when
# nothing makes up for that any more; measured 0.69 ... 0.89.
TURNED_TOLERANCE = 0.95
# U^T U against the inverse in float64, over the largest entry of the inverse.
FACTOR_TOLERANCE = 1e-4

GRIDS = [Grid(4, 32), Grid(4, 64), Grid(4), Grid(4, 32, False), Grid(8, 32), Grid(8), Grid(8, 64, False)]
GRIDS += [Grid(4, 32, positive=True), Grid(4, positive=True), Grid(8, positive=True)]


def transcribed(layer, grid: Grid, damping: float, order: list[int], mask=None) -> Quantized:
    """Equations 2 and 3 of the paper in float64: a column at a time, all others updated, the inverse reduced by Gauss.

    Scales come from the search that has its own tests, since this one is about the order of rounding and updates.
    """
    weights, moment = layer.weights.double().numpy().copy(), layer.moment.double().numpy()
    kept = np.ones(weights.shape, bool) if mask is None else mask.numpy()
    damped = moment.copy()
    np.fill_diagonal(damped, np.where(np.diag(moment) == 0, 1, np.diag(moment)))
    inverse = np.linalg.inv(damped + damping * np.diag(damped).mean() * np.eye(len(moment)))
    width = grid.width(weights.shape[1])
    _, scales, zeros = clip.search(layer.weights * torch.from_numpy(kept), layer.moment, grid)
    values = np.zeros(weights.shape, np.int8)
    for channel in order:
        group = channel // width
        s, z = scales[:, group].double().numpy(), zeros[:, group].double().numpy()
        step = np.clip(np.rint(weights[:, channel] / s), grid.low - z, grid.high - z) * kept[:, channel]
        values[:, channel] = step + z
        error = (weights[:, channel] - step * s) / inverse[channel, channel]
        weights -= np.outer(error, inverse[channel])
        inverse -= np.outer(inverse[:, channel], inverse[channel]) / inverse[channel, channel]
    return Quantized(values, scales.numpy(), grid, None if grid.symmetric else zeros.numpy().astype(np.int8))


def activation_order(layer) -> list[int]:
    return np.argsort(-layer.moment.diagonal().numpy(), kind="stable").tolist()


def agrees(layer, found: Quantized, wanted: Quantized) -> bool:
    same = (found.values == wanted.values).mean() >= SAME_INTEGERS
    return bool(same and abs(layer.error(found) / layer.error(wanted) - 1) < ERROR_TOLERANCE)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_is_the_papers_algorithm_in_activation_order(layer, grid):
    found = gptq.quantize(layer.weights, layer.moment, grid)
    assert agrees(layer, found, transcribed(layer, grid, 0.01, activation_order(layer)))


def test_blocks_of_lazy_updates_change_nothing(layer, monkeypatch):
    whole = gptq.quantize(layer.weights, layer.moment, Grid(4, 32))
    monkeypatch.setattr(gptq, "LAZY_BLOCK", 32)
    parts = gptq.quantize(layer.weights, layer.moment, Grid(4, 32))
    assert agrees(layer, parts, whole)


def test_another_order_or_damping_exceeds_the_tolerances(layer):
    found, order = gptq.quantize(layer.weights, layer.moment, Grid(4, 32)), activation_order(layer)
    assert not agrees(layer, found, transcribed(layer, Grid(4, 32), 0.01, list(range(96))))
    assert not agrees(layer, found, transcribed(layer, Grid(4, 32), 0.1, order))


def test_the_factor_is_that_of_the_inverse(layer):
    assert factor_error(layer, 0.01) < FACTOR_TOLERANCE
    assert factor_error(layer, 0.011) > FACTOR_TOLERANCE


def factor_error(layer, damping: float) -> float:
    moment = layer.moment.double()
    moment[40, 40] = 1
    wanted = torch.linalg.inv(moment + 0.01 * moment.diagonal().mean() * torch.eye(96))
    factor = gptq.inverse_factor(layer.moment.clone(), damping).double()
    assert not factor.tril(-1).any()
    return float((factor.T @ factor - wanted).abs().max() / wanted.abs().max())


# ------------------------------------------------------------------------------------------------------ what it is for


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_beats_rounding_to_nearest(layer, grid):
    found = gptq.quantize(layer.weights, layer.moment, grid)
    assert layer.error(found) < GAIN_TOLERANCE * layer.error(rtn.quantize(layer.weights.numpy(), grid))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_for_inputs_it_was_not_told_of_it_exceeds_the_tolerance(layer, grid):
    found = gptq.quantize(layer.weights, torch.eye(96), grid)
    assert layer.error(found) > GAIN_TOLERANCE * layer.error(rtn.quantize(layer.weights.numpy(), grid))


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4)], ids=str)
def test_what_a_positive_grid_costs_is_made_up_for(layer, turned, grid):
    free = gptq.quantize(layer.weights, layer.moment, grid)
    found = gptq.quantize(layer.weights, layer.moment, replace(grid, positive=True))
    assert (found.scales > 0).all()
    assert layer.error(found) < TURNED_TOLERANCE * layer.error(turned(free))
    nearest = rtn.quantize(layer.weights.numpy(), replace(grid, positive=True))
    assert layer.error(nearest) > TURNED_TOLERANCE * layer.error(turned(free))


def test_a_group_of_zeros_on_a_positive_grid_stays_zero(layer):
    weights, grid = layer.weights.clone(), Grid(4, 32, positive=True)
    weights[:, 32:64] = 0
    found = gptq.quantize(weights, layer.moment, grid)
    assert (found.scales > 0).all()
    assert (found.scales[:, 1] == SMALLEST_SCALE).all()
    assert np.abs(found.dequantize()[:, 32:64]).max() <= 8 * SMALLEST_SCALE


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 32, False), Grid(4, 32, positive=True)], ids=str)
def test_pruned_weights_stay_zero_and_the_others_make_up_for_them(layer, grid):
    mask = (torch.arange(24)[:, None] + torch.arange(96)) % 4 < 2
    found = gptq.quantize(layer.weights, layer.moment, grid, mask=mask)
    assert not found.dequantize()[~mask.numpy()].any()
    before = gptq.quantize(layer.weights * mask, layer.moment, grid)
    assert layer.error(found) < MASK_TOLERANCE * layer.error(before)


def test_pruning_afterwards_exceeds_the_mask_tolerance(layer):
    mask = (torch.arange(24)[:, None] + torch.arange(96)) % 4 < 2
    before = gptq.quantize(layer.weights * mask, layer.moment, Grid(4, 32))
    whole = gptq.quantize(layer.weights, layer.moment, Grid(4, 32))
    after = Quantized(whole.values * mask.numpy(), whole.scales, whole.grid)
    assert layer.error(after) > MASK_TOLERANCE * layer.error(before)


def test_a_masked_layer_is_the_papers_algorithm_too(layer):
    mask = (torch.arange(24)[:, None] + torch.arange(96)) % 4 < 2
    found = gptq.quantize(layer.weights, layer.moment, Grid(4, 32), mask=mask)
    wanted = transcribed(layer, Grid(4, 32), 0.01, activation_order(layer), mask=mask)
    assert agrees(layer, found, wanted)


# --------------------------------------------------------------------------------------------------------- hard inputs


def test_a_channel_never_seen_is_rounded_to_nearest(layer):
    found = gptq.quantize(layer.weights, layer.moment, Grid(8, 32))
    nearest = np.rint(layer.weights.numpy()[:, 40] / found.scales[:, 1])
    np.testing.assert_array_equal(found.values[:, 40], np.clip(nearest, -128, 127))


def test_inputs_of_low_rank_are_taken(layer):
    x = layer.x[:3]
    found = gptq.quantize(layer.weights, x.T @ x / 3, Grid(4, 32))
    assert np.isfinite(found.scales).all()


def test_inputs_that_are_all_zero_are_taken(layer):
    weights = layer.weights.numpy()
    found, nearest = gptq.quantize(layer.weights, torch.zeros(96, 96), Grid(4, 32)), rtn.quantize(weights, Grid(4, 32))
    assert np.square(found.dequantize() - weights).sum() <= np.square(nearest.dequantize() - weights).sum()


def test_damping_grows_until_the_moment_can_be_factorized():
    moment = torch.eye(8)
    moment[0, 1] = moment[1, 0] = 1.05  # not positive definite until more than 0.05 is added
    assert torch.equal(gptq.inverse_factor(moment.clone(), 0.01), gptq.inverse_factor(moment.clone(), 0.1))


def test_a_moment_that_is_none_is_refused():
    moment = torch.eye(8)
    moment[0, 1] = moment[1, 0] = 5
    with pytest.raises(BuildError, match="calibrate with more samples"):
        gptq.inverse_factor(moment, 0.01)


def test_damping_0_is_raised_where_it_does_not_do():
    moment = torch.ones(8, 8)
    assert torch.equal(gptq.inverse_factor(moment.clone(), 0), gptq.inverse_factor(moment.clone(), 1e-4))


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_a_moment_that_is_not_finite_is_refused(layer, scheme):
    moment = layer.moment.clone()
    moment[3, 4] = float("nan")
    with pytest.raises(BuildError, match="not finite"):
        {"gptq": gptq, "awq": awq}[scheme].quantize(layer.weights, moment, Grid(4, 32))


def test_arguments_are_left_as_they_were(layer):
    weights, moment = layer.weights.clone(), layer.moment.clone()
    gptq.quantize(layer.weights, layer.moment, Grid(4, 32))
    assert torch.equal(weights, layer.weights)
    assert torch.equal(moment, layer.moment)
