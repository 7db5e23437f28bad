"""Statistics of a linear's inputs X [tokens, K].

For a change D of weights [N, K] the outputs change by |X D^T|^2 / tokens = tr(D H D^T), with the second moment H = X^T
X / tokens [K, K].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmc.optimize.quantize.gptq import Inputs

# Rows of a second moment that are added to at a time: of 4,864 inputs, a twentieth more than half are computed.
PANEL = 512


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of inputs X [tokens, K]."""

    second_moment: Tensor | None  # X^T X / tokens, float32 [K, K]; None where it was not collected
    absmax: Tensor  # largest magnitude of each channel, float32 [K]
    norms: Tensor  # root mean square of each channel, float32 [K]

    @cached_property
    def inputs(self) -> Inputs:
        """The second moment, with what is computed from it once for all linears that read the inputs."""
        assert self.second_moment is not None, "calibration collects second moments for gptq"
        return Inputs(self.second_moment)

    def scale(self, factors: Tensor) -> "InputStatistics":
        """The statistics of X * factors, for positive factors [K]."""
        moment = self.second_moment
        scaled = None if moment is None else moment * factors * factors[:, None]
        return InputStatistics(scaled, self.absmax * factors, self.norms * factors)


class Accumulator:
    """Collects statistics of inputs [..., K] batch by batch; second moments only with ``moments``."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu", moments: bool = True) -> None:
        self._moment = torch.zeros(inputs, inputs, device=device) if moments else None
        self._absmax = torch.zeros(inputs, device=device)
        self._mean_square = torch.zeros(inputs, device=device)
        self._tokens = 0

    def update(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        self._tokens += len(rows)
        self._absmax = torch.maximum(self._absmax, rows.abs().amax(0))
        share = len(rows) / self._tokens  # a running mean keeps sums small enough for float32
        self._mean_square.lerp_(rows.square().mean(0), share)
        if self._moment is not None:
            for start, stop in self._panels():  # on and above the diagonal
                panel = self._moment[start:stop, start:]
                panel.addmm_(rows[:, start:stop].T, rows[:, start:], beta=1 - share, alpha=share / len(rows))

    def _panels(self) -> Iterator[tuple[int, int]]:
        return ((start, start + PANEL) for start in range(0, len(self._absmax), PANEL))

    def finish(self) -> InputStatistics:
        if self._moment is not None:
            for start, stop in self._panels():
                self._moment[stop:, start:stop] = self._moment[start:stop, stop:].T
        return InputStatistics(self._moment, self._absmax, self._mean_square.sqrt())
