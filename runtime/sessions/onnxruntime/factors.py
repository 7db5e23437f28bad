"""Factors of adapters as inputs of a graph: those of every row's own, written when the row gets another adapter."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmc.bundle import FACTOR_A, FACTOR_B
from llmc.runtime.sessions.adapters import Adapter, Array

# Ranks are filled up with zeros to a multiple of it, so that kernels take the same code whatever is loaded beside.
RANK_STEP = 8


class RowFactors:
    """Float32 [rows, inputs, modules * rank] and [rows, rank, outputs] for the inputs of a session's ``graph``."""

    def __init__(self, graph: Any) -> None:
        names = (FACTOR_A, FACTOR_B)
        self._inputs = [(it.name, it.shape) for it in graph.get_inputs() if it.name.startswith(names)]
        self._arrays: list[Array] = []
        self._held: list[str | None] = []
        self._rank = 0

    def make_room(self, rows: int, adapters: Sequence[Adapter | None]) -> bool:
        """Make room for so many rows and the rank of these adapters; True if the arrays are new ones."""
        rank = max(self._rank, *(-(-it.info.rank // RANK_STEP) * RANK_STEP for it in adapters if it is not None))
        if rank == self._rank and rows <= len(self._held):
            return False
        self._rank, self._held = rank, [None] * rows
        self._arrays.clear()
        for name, (_, *sizes) in self._inputs:
            inputs, outputs = (it if isinstance(it, int) else rank for it in sizes)
            shape = (inputs, rank * (name.count("+") + 1)) if name.startswith(FACTOR_A) else (rank, outputs)
            self._arrays.append(np.zeros((rows, *shape), np.float32))  # memory that nobody writes is not taken
        return True

    def fill(self, first: int, adapters: Sequence[Adapter | None]) -> None:
        """Write the factors of the rows from ``first`` on that have others than before."""
        for row, adapter in enumerate(adapters, first):
            wanted = None if adapter is None else adapter.info.sha256
            if wanted != self._held[row]:
                self._held[row] = wanted
                for (name, _), array in zip(self._inputs, self._arrays, strict=True):
                    self._write(name, array[row], adapter)

    def views(self, first: int, count: int) -> Iterator[tuple[str, Array]]:
        """The inputs of a call for so many rows, by name."""
        for (name, _), array in zip(self._inputs, self._arrays, strict=True):
            yield name, array[first : first + count]

    def _write(self, name: str, target: Array, adapter: Adapter | None) -> None:
        target[:] = 0
        factors = adapter.factors if adapter is not None else {}
        if name.startswith(FACTOR_B):
            if found := factors.get(name.removeprefix(FACTOR_B)):
                target[: len(found[1])] = found[1]
            return
        for number, module in enumerate(name.removeprefix(FACTOR_A).split("+")):
            if found := factors.get(module):
                start = number * self._rank
                target[:, start : start + len(found[0])] = found[0].T
