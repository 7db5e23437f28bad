"""Normalisations."""

from dataclasses import dataclass
from typing import Literal

from llmc.bundle.model.ranges import Index, Width

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Norm:
    """A normalisation over runs of ``size`` values.

    Attributes:
        name: module path.
        kind: ``rms`` divides by the root of the mean square, ``layer`` by the standard deviation after subtracting the
            mean.
        size: values that are normalised together, and length of the weight.
        bias: whether a bias [size] is added.
        follows_residual: whether it is the first to read a sum of the residual stream, as it stands.
        layer: index of its layer, None for the one before the head.
    """

    name: str
    kind: NormKind
    size: Width
    bias: bool
    follows_residual: bool
    layer: Index | None
