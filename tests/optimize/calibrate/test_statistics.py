"""Statistics are those of all inputs, however they come in batches."""

import numpy as np
import pytest
import torch

from llmc.optimize.calibrate.statistics import Accumulator, InputStatistics

# Sums of 5,000 products of magnitude 1 in float32, over the root of the product of the diagonal.
MOMENT_TOLERANCE = 2e-6
# Largest magnitudes times a factor, rounded once.
SCALE_TOLERANCE = 1e-6


def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5000, 24, generator=generator) * torch.logspace(-4, 3, 24) + torch.linspace(-1, 1, 24)


def collect(x: torch.Tensor, batch: int = 333, moments: bool = True) -> InputStatistics:
    accumulator = Accumulator(x.shape[-1], moments=moments)
    for part in x.split(batch):
        accumulator.update(part)
    return accumulator.finish()


def moment_error(x: torch.Tensor, moment: torch.Tensor) -> float:
    wanted = x.double().T @ x.double() / len(x)
    size = (wanted.diagonal() * wanted.diagonal()[:, None]).sqrt()
    return float(((moment - wanted).abs() / size).max())


@pytest.mark.parametrize("batch", [1000, 333, 5000])
def test_the_second_moment_is_that_of_all_inputs(batch):
    x = inputs()
    moment = collect(x, batch).second_moment
    assert moment.dtype == torch.float32
    assert moment_error(x, moment) < MOMENT_TOLERANCE


def test_a_lost_row_exceeds_the_moment_tolerance():
    x = inputs()
    assert moment_error(x, collect(x[:-1]).second_moment) > MOMENT_TOLERANCE


def test_ranges_are_those_of_all_inputs():
    x = inputs()
    np.testing.assert_array_equal(collect(x).absmax, x.abs().amax(0))


@pytest.mark.parametrize("moments", [True, False])
def test_scaled_statistics_are_those_of_scaled_inputs(moments):
    x, factors = inputs(), torch.logspace(2, -2, 24)
    got, wanted = collect(x, moments=moments).scale(factors), collect(x * factors, moments=moments)
    np.testing.assert_allclose(got.absmax, wanted.absmax, rtol=SCALE_TOLERANCE)
    assert (got.second_moment is None) == (not moments)
    assert not moments or moment_error(x * factors, got.second_moment) < MOMENT_TOLERANCE
