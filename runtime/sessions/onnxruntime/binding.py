"""Arrays bound to a graph by address, once for each shape of call."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle.contract import INPUTS, Input

Arrays = Mapping[str, NDArray[Any]]


def bind(bind: Any, name: str, array: NDArray[Any]) -> None:
    """Bind an array by its address, which has to outlive the binding."""
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class Binding:
    """A graph with its inputs and outputs for one shape of call.

    Args:
        given: inputs that stay as they are.
        results: outputs.
        feeds: what a call of this shape brings; the graph's other inputs of contract 1 are plain.
        attended: positions that the caches have room for.
    """

    def __init__(self, graph: Any, given: Arrays, results: Arrays, feeds: Arrays, attended: int = 0) -> None:
        self.graph, self.io, self.results, self._given = graph, graph.io_binding(), results, given
        self.head: Binding | None = None  # runs next
        self._filled = list[tuple[Input, NDArray[Any]]]()
        for value in graph.get_inputs():
            if (asked := INPUTS.get(value.name.partition(".")[0])) is not None:
                shape = asked.size(value.shape, feeds, attended)
                self._filled.append((asked, np.empty(shape, asked.type)))
                bind(self.io.bind_input, value.name, self._filled[-1][1])
        for name, array in given.items():
            bind(self.io.bind_input, name, array)
        for name, array in results.items():
            bind(self.io.bind_output, name, array)

    def fill(self, feeds: Arrays) -> None:
        """Copy what a call brings, and what is plain in it."""
        for asked, array in self._filled:
            asked.fill(array, feeds)

    def run(self, options: Any) -> None:
        self.graph.run_with_iobinding(self.io, options)
        if self.head is not None:
            self.head.run(options)
