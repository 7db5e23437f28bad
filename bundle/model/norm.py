"""Normalisations."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.ranges import Index, Width

# ``rms`` divides by the root of the mean square, ``layer`` subtracts the mean and divides by the standard deviation.
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Norm:
    """A normalisation over runs of ``size`` values."""

    name: str  # module path
    kind: NormKind
    size: Width  # values that are normalised together, and length of the weight
    bias: bool  # a bias [size] is added
    follows_residual: bool  # it is the first to read a sum of the residual stream
    layer: Index | None  # None for the norm before the head
