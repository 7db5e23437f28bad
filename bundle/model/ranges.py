"""Ranges of numbers that come from a file.

They are far beyond the largest decoders, and so small that a product of a few of them is a number of bytes to report.
"""

from typing import Annotated

Index = Annotated[int, range(1 << 12)]

Count = Annotated[int, range(1, 1 << 12)]  # layers, heads

Width = Annotated[int, range(1, 1 << 20)]

Vocabulary = Annotated[int, range(1, 1 << 24)]

Positions = Annotated[int, range(1, 1 << 28)]
