"""Memory that the samplers of a thread share, one choice after the other.

A step of the model evicts every cache. Memory that the sampler before has just used is warm for the next one; eight
samplers with memory of their own fetch, and take, eight times as much.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from llmc.runtime.sampling.masses import Logits, Masses


class _Shelf(threading.local):
    """Memory that a thread keeps, by the size of the vocabulary."""

    def __init__(self) -> None:
        self.logits: defaultdict[int, list[Logits]] = defaultdict(list)
        self.masses: dict[int, Masses] = {}


_SHELF = _Shelf()


@contextmanager
def borrowed(size: int) -> Iterator[Logits]:
    """A float32 array [size] with any content, for the time of the block; blocks may lie inside each other."""
    free = _SHELF.logits[size]
    array = free.pop() if free else np.empty(size, np.float32)
    try:
        yield array
    finally:
        free.append(array)


def masses(size: int) -> Masses:
    """This thread's masses of ``size`` tokens, until it asks again."""
    found = _SHELF.masses.get(size)
    if found is None:
        found = _SHELF.masses[size] = Masses(size)
    return found
