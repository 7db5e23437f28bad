"""Prune weights [N, K]: set the least important weights of each row to zero, before they are quantized.

The importance of a weight is its magnitude |w_nk|, or that times the norm of its input over the calibration text,
|w_nk| * |X_k| (Wanda: Sun et al. 2023, arXiv:2306.11695, equation 1). A pattern is ``2:4``, which keeps two of every
four consecutive inputs, as sparse tensor cores read them (Mishra et al. 2021, arXiv:2104.08378), or the share of each
row that becomes zero, as ``0.5``. Rows are pruned one by one, so a matrix may come in pieces; a factor of a row
changes nothing, and neither does one of a column that divides its input.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import TWO_OF_FOUR
from llmc.optimize.quantize.grid import Float

GROUP, KEPT = 4, 2


@dataclass(frozen=True)
class Pruning:
    """The pattern of zeros, and the names of the tensors that get it."""

    pattern: str = ""
    tensors: Collection[str] = ()

    def prune(self, tensor: str, rows: Float, norms: Float | None) -> Float:
        """Rows [n, K] of a tensor, pruned if it is one of :attr:`tensors`; ``norms`` [K] as in :func:`keep_mask`."""
        return np.where(keep_mask(rows, self.pattern, norms), rows, np.float32(0)) if tensor in self.tensors else rows


def keep_mask(weights: Float, pattern: str, norms: Float | None = None) -> NDArray[np.bool_]:
    """True [N, K] for the weights [N, K] that stay, the first of equal ones. ``2:4`` keeps the last weights of a row
    whose length is no multiple of four.

    Args:
        pattern: ``2:4``, or the share of each row that becomes zero.
        norms: root mean square of the inputs [K], for Wanda's rule; None decides by magnitude.
    """
    importance = np.abs(weights) if norms is None else np.abs(weights) * norms
    if pattern != TWO_OF_FOUR:
        inputs = weights.shape[1]
        return _keep_largest(importance, inputs - int(float(pattern) * inputs))
    whole = weights.shape[1] // GROUP * GROUP
    kept = np.ones(weights.shape, bool)
    kept[:, :whole] = _keep_largest(importance[:, :whole].reshape(-1, GROUP), KEPT).reshape(len(weights), whole)
    return kept


def _keep_largest(importance: Float, count: int) -> NDArray[np.bool_]:
    kept = np.zeros(importance.shape, bool)
    np.put_along_axis(kept, np.argsort(-importance, axis=1, kind="stable")[:, :count], True, axis=1)
    return kept
