"""Ranges of numbers that come from a file."""

from typing import Annotated

# Ranges of what comes from a file, far beyond the largest decoders there are, and small enough that a product of a few
# of them is a number of bytes that somebody can be told.
Index = Annotated[int, range(1 << 12)]

Count = Annotated[int, range(1, 1 << 12)]  # layers, heads

Width = Annotated[int, range(1, 1 << 20)]

Vocabulary = Annotated[int, range(1, 1 << 24)]

Positions = Annotated[int, range(1, 1 << 28)]
