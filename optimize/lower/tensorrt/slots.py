"""Places of a call's tokens in the cache: values that every layer's attention reads, made once."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmc.optimize.lower.rewrite import Emitter, graph_input, scalar, vector

CACHE_SLOTS = "cache_slots"


@dataclass(frozen=True)
class Slots:
    """Shared values of a graph."""

    # int64 [A], 0 ... A-1, the input whose length says how many cache positions attention looks at.
    cache_slots: ir.Value
    past_lengths: ir.Value  # int64 [B], the graph's input
    positions: ir.Value  # int64 [B, S] of the new tokens
    # by window and repeats, bool [B, 1, repeats * S, A], true where a query may look
    masks: dict[tuple[int, int], ir.Value]

    @classmethod
    def before(cls, first: ir.Node, masks: Collection[tuple[int, int]]) -> "Slots":
        """Make them in front of the first attention.

        Args:
            first: a ``llmc::CachedAttention``.
            masks: windows, and how often the queries of a row follow each other in a mask.
        """
        emit = Emitter(first, "positions")
        graph = emit.graph
        cache_slots = ir.Value(name=CACHE_SLOTS, shape=ir.Shape(["attended"]), type=ir.TensorType(ir.DataType.INT64))
        graph.inputs.insert(3, cache_slots)  # behind those that every call has
        positions = token_positions(emit)
        column = emit("Unsqueeze", positions, vector(graph, [1, 3]))  # (B, 1, S, 1)
        columns = {
            repeats: column if repeats == 1 else emit("Tile", column, vector(graph, [1, 1, repeats, 1]))
            for repeats in sorted({repeats for _, repeats in masks})
        }
        made = {(window, n): _mask(emit, cache_slots, columns[n], window) for window, n in sorted(set(masks))}
        return cls(cache_slots, graph_input(graph, "past_lengths"), positions, made)


def token_positions(emit: Emitter) -> ir.Value:
    """Positions of the new tokens, int64 [B, S]."""
    graph = emit.graph
    ids, past_lengths = graph_input(graph, "input_ids"), graph_input(graph, "past_lengths")
    sequence = emit("Squeeze", emit("Shape", ids, start=1, end=2), vector(graph, [0]))
    steps = emit("Range", scalar(graph, 0, np.int64), sequence, scalar(graph, 1, np.int64))
    return emit("Add", emit("Unsqueeze", past_lengths, vector(graph, [1])), steps)


def _mask(emit: Emitter, slots: ir.Value, column: ir.Value, window: int) -> ir.Value:
    """A query at position p sees the slots 0 ... p, with a window W only p-W+1 ... p."""
    causal = emit("LessOrEqual", slots, column)
    if not window:
        return causal
    oldest = emit("Sub", column, scalar(emit.graph, window, np.int64))
    return emit("And", causal, emit("Greater", slots, oldest))
