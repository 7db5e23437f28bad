"""A small layer whose inputs are correlated, with an outlier channel and one that is never seen."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from llmc.optimize.calibrate.statistics import Accumulator, InputStatistics
from llmc.optimize.quantize.grid import Quantized


class Layer(NamedTuple):
    """Weights [N, K], inputs [tokens, K] and their statistics."""

    weights: torch.Tensor
    x: torch.Tensor
    statistics: InputStatistics

    @property
    def moment(self) -> torch.Tensor:
        moment = self.statistics.second_moment
        assert moment is not None
        return moment

    def error(self, quantized: Quantized) -> float:
        """Mean square error of the outputs per token, summed over outputs, from the inputs themselves in float64."""
        change = quantized.dequantize().astype(np.float64) - self.weights.numpy().astype(np.float64)
        return float(np.square(self.x.numpy().astype(np.float64) @ change.T).sum() / len(self.x))


def make_layer(outputs: int = 24, inputs: int = 96, tokens: int = 400) -> Layer:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator)
    x = x @ (torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + 0.3 * torch.eye(inputs))
    x[:, 7] *= 20
    x[:, 40] = 0
    accumulator = Accumulator(inputs)
    for part in x.split(150):
        accumulator.update(part)
    weights = torch.randn(outputs, inputs, generator=generator) * 0.02
    return Layer(weights, x, accumulator.finish())


@pytest.fixture(scope="session")
def layer() -> Layer:
    return make_layer()
