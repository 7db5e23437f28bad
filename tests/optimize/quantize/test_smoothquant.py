"""SmoothQuant changes no product of matrices, and takes the paper's scales."""

import numpy as np
import pytest
import torch

from llmc.errors import BuildError
from llmc.optimize.quantize import smoothquant

# A power and a quotient in float32.
SCALE_TOLERANCE = 1e-5


def layer(seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Inputs [200, 64] with an outlier channel, and two weights that read them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 64, generator=generator)
    x[:, 5] *= 50
    return x, [torch.randn(rows, 64, generator=generator) * 0.02 for rows in (48, 16)]


def largest(weights: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each column."""
    return torch.cat(weights).abs().amax(0)


def transcribed(x: torch.Tensor, weights: list[torch.Tensor], alpha: float) -> list[float]:
    """Equation 4 of the paper, a channel at a time in Python's float64."""
    found = []
    for channel in range(x.shape[1]):
        activation = max(abs(float(value)) for value in x[:, channel])
        weight = max(abs(float(value)) for matrix in weights for value in matrix[:, channel])
        found.append(activation**alpha / weight ** (1 - alpha))
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_scales_are_the_papers(alpha):
    x, weights = layer()
    got = smoothquant.scales(x.abs().amax(0), largest(weights), alpha=alpha)
    np.testing.assert_allclose(got.numpy(), transcribed(x, weights, alpha), rtol=SCALE_TOLERANCE)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dead_channels_keep_scale_1_and_none_goes_out_of_range(alpha):
    x, weights = layer()
    x[:, 3] = 0
    weights = [weight.clone() for weight in weights]
    for weight in weights:
        weight[:, 7] = 0
    x[:, 9] = 1e30
    got = smoothquant.scales(x.abs().amax(0), largest(weights), alpha=alpha)
    assert got[3] == got[7] == 1
    assert got.min() >= 1 / smoothquant.LARGEST_SCALE
    assert got.max() <= smoothquant.LARGEST_SCALE


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_senseless_ranges_are_refused(value):
    x, weights = layer()
    absmax = x.abs().amax(0)
    absmax[2] = value
    with pytest.raises(BuildError, match="calibrate again"):
        smoothquant.scales(absmax, largest(weights), alpha=0.5)


def test_another_alpha_exceeds_the_scale_tolerance():
    x, weights = layer()
    got = smoothquant.scales(x.abs().amax(0), largest(weights), alpha=0.5).numpy()
    assert not np.allclose(got, transcribed(x, weights, 0.5001), rtol=SCALE_TOLERANCE)
