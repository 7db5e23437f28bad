"""Statistics of a linear's inputs X [tokens, K].

For a change D of weights [N, K] the outputs change by |X D^T|^2 / tokens = tr(D H D^T), with the second moment H = X^T
X / tokens [K, K].
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of inputs X [tokens, K].

    Attributes:
        second_moment: X^T X / tokens, float32 [K, K]; None where it was not collected.
        mean_square: its diagonal, float32 [K].
        absmax: largest magnitude of each channel, float32 [K].
        mean_abs: mean magnitude of each channel, float32 [K].
    """

    second_moment: Tensor | None
    mean_square: Tensor
    absmax: Tensor
    mean_abs: Tensor

    def scaled(self, factors: Tensor) -> "InputStatistics":
        """The statistics of X * factors, for positive factors [K]."""
        moment = self.second_moment
        return replace(
            self,
            second_moment=None if moment is None else moment * factors * factors[:, None],
            mean_square=self.mean_square * factors.square(),
            absmax=self.absmax * factors,
            mean_abs=self.mean_abs * factors,
        )


class Accumulator:
    """Collects statistics of inputs [..., K] batch by batch; second moments beyond the diagonal only with
    ``moments``."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu", moments: bool = True) -> None:
        self._moment = torch.zeros(inputs, inputs, device=device) if moments else None
        self._square = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._sum = torch.zeros(inputs, dtype=torch.float64, device=device)
        self._absmax = torch.zeros(inputs, device=device)
        self._tokens = 0

    def update(self, x: Tensor) -> None:
        """Add inputs [..., K]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        magnitudes = rows.abs()
        self._tokens += len(rows)
        self._square += rows.square().sum(0, dtype=torch.float64)
        self._sum += magnitudes.sum(0, dtype=torch.float64)
        self._absmax = torch.maximum(self._absmax, magnitudes.amax(0))
        if self._moment is not None:
            # A running mean keeps the sum in the range where float32 adds exactly enough.
            share = len(rows) / self._tokens
            self._moment.addmm_(rows.T, rows, beta=1 - share, alpha=share / len(rows))

    def finish(self) -> InputStatistics:
        """The statistics of all that was added; at least one row must have been."""
        square, mean = ((total / self._tokens).float() for total in (self._square, self._sum))
        return InputStatistics(self._moment, square, self._absmax, mean)
