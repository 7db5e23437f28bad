"""States of a row after some of a call's tokens, from what the call gave beside its logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.bundle import MOST_REPLAYED, REPLAY
from llmc.runtime.kv.cache import CacheTensor
from llmc.runtime.sessions.onnxruntime.binding import Binding

Named = tuple[str, NDArray[Any]]
States = list[tuple[CacheTensor, NDArray[Any]]]


class Replay:
    """The graph that computes states anew, and room for what it needs of a provisional call.

    Nothing but convolutions and recurrences runs, so accepting tokens costs a small part of feeding them. Where all of
    them are accepted, the states that the call left are copied.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        given = [value for value in graph.get_inputs() if value.name.startswith(f"{REPLAY}.")]
        self._kept = {value.name: np.empty((1, MOST_REPLAYED, value.shape[2]), np.float32) for value in given}
        self._left: dict[str, NDArray[Any]] = {}

    def outputs(self, tokens: int, states: States) -> Iterator[Named]:
        """Arrays for what a provisional call of so many tokens gives beside logits, keys and values."""
        for tensor, array in states:
            if tensor.present not in self._left:
                self._left[tensor.present] = np.empty_like(array)
            yield tensor.present, self._left[tensor.present]
        yield from self._parts(tokens)

    def accept(self, tokens: int, fed: int, states: States, options: Any) -> None:
        """Continue a row's states by the first ``tokens`` of the ``fed`` ones of the last provisional call."""
        if tokens < fed:
            feeds = {"input_ids": np.zeros((1, tokens), np.int64)}
            given = {**dict(self._parts(tokens)), **{tensor.past: array for tensor, array in states}}
            binding = Binding(self._graph, given, {tensor.present: array for tensor, array in states}, feeds)
            binding.fill(feeds)
            binding.run(options)
            return
        for tensor, array in states:
            array[:] = self._left[tensor.present]

    def _parts(self, tokens: int) -> Iterator[Named]:
        return ((name, array[:, :tokens]) for name, array in self._kept.items())
