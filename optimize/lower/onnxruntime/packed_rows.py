"""Rows of different lengths in a call: their tokens lie side by side, and attention alone sees them row by row.

Padding is dropped behind the embedding, and room for it is made again in front of attention. The graph gets one more
input, ``new_lengths`` int64 [B]: so many of a row's new tokens count, at least one of all rows'.
"""

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.bundle.model.recurrent import Recurrent
from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import AHEAD, GQA, emit_token_counts
from llmc.optimize.lower.onnxruntime.hidden import SLOTS
from llmc.optimize.lower.rewrite import (
    LLMC,
    MICROSOFT,
    Emitter,
    graph_input,
    node_after,
    nodes_of,
    replace,
    scalar,
    sole_consumer,
    vector,
)

NEW_LENGTHS = "new_lengths"
# Inputs of GroupQueryAttention: positions with the new tokens, less one; their bound; valid tokens of each row.
SEQLENS_K, TOTAL, QUERY_SEQLENS = 5, 6, 16


def pack_rows(graph: ir.Graph, context: LoweringContext) -> int:
    """Everything but embedding and attention works on tokens that count [1, T, H]; the number of attentions."""
    if not context.ragged_rows or context.phase != "prefill":
        return 0
    geometry = context.geometry
    attentions = [(node, geometry.attention[node.name or ""]) for node in nodes_of(graph, GQA, MICROSOFT)]
    if len(attentions) < len(geometry.attentions):  # some are in basic operators, which know no padding
        return 0
    packed = _Packed(graph)
    packed.enter(geometry.hidden_size)
    for node, attention in attentions:
        packed.attend(node, attention)
    for recurrent in geometry.recurrents:
        packed.recur(graph, recurrent)
    packed.take_logit_rows()
    graph.meta[SLOTS] = packed.slots
    return len(attentions)


class _Packed:
    """A graph whose rows are being packed.

    Attributes:
        places: int64 [T], where in the rows [B * S] each token that counts lies.
        slots: int64 [B, S], which of those T tokens lies there; in the padding any.
        lengths: further inputs of attention, by their index.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, ids, past = graph, graph_input(graph, "input_ids"), graph_input(graph, "past_lengths")
        new_lengths = next((value for value in graph.inputs if value.name == NEW_LENGTHS), None)
        if new_lengths is None:
            new_lengths = ir.Value(name=NEW_LENGTHS, type=past.type, shape=past.shape)
            graph.inputs.append(new_lengths)
        counted = emit_token_counts(graph)
        emit = Emitter(node_after(counted), "packed")
        valid = emit("LessOrEqual", counted, emit("Unsqueeze", new_lengths, vector(graph, [1])))
        flags = emit("Reshape", valid, vector(graph, [-1]))
        self.places = emit("Squeeze", emit("NonZero", flags), vector(graph, [0]))
        numbers = emit("CumSum", emit("Cast", flags, to=ir.DataType.INT64), scalar(graph, 0, np.int64))
        self.slots = emit("Reshape", emit("Sub", numbers, scalar(graph, 1, np.int64)), emit("Shape", ids))
        new = emit("Cast", new_lengths, to=ir.DataType.INT32)
        totals = emit("Add", emit("Cast", past, to=ir.DataType.INT32), new)
        # The operator wants a position even of a row that has none, and no fewer in all than a row has tokens.
        last = emit("Max", emit("Sub", totals, scalar(graph, 1, np.int32)), scalar(graph, 0, np.int32))
        width = emit("Cast", emit("Squeeze", emit("Shape", ids, start=1, end=2)), to=ir.DataType.INT32)
        bound = emit("Max", emit("ReduceMax", totals, keepdims=0), width)
        self.lengths = {SEQLENS_K: last, TOTAL: bound, QUERY_SEQLENS: new}

    def enter(self, hidden_size: int) -> None:
        """Drop the padding behind the embedding, and of ids and positions that are read later."""
        first = next((value for node in self.graph for value in node.outputs if value.name == "hidden.0"), None)
        if first is None:
            raise BuildError("the graph has no value hidden.0 behind its embedding; export the checkpoint again")
        ids, positions = graph_input(self.graph, "input_ids"), self.graph.meta.get("positions")
        ahead = [self.graph.meta[AHEAD]] if AHEAD in self.graph.meta else []
        row_by_row = _list_producers([first, self.graph.meta["counted"], self.slots, *self.lengths.values(), *ahead])
        made = first.producer()
        assert made is not None
        for value in made.outputs:  # a skip norm gives what it normalized, too
            if value.uses():
                self._pack(value, node_after(value), [-1, hidden_size])
        by_token = [ids, *(value for value in self.graph.inputs if value.name == "embedding_indices")]
        for value in by_token:  # rows of embeddings may be added behind layers, too
            self._pack(value, node_after(self.places), [-1], keep=row_by_row)
        if positions is not None:
            self._pack(positions, node_after(positions), [-1])

    def attend(self, node: ir.Node, attention: Attention) -> None:
        """Give an attention its tokens row by row, with how many of each row count."""
        self._unpack(node, range(3))
        node.resize_inputs(QUERY_SEQLENS + 1)
        for index, value in self.lengths.items():
            node.replace_input_with(index, value)
        width = attention.heads * attention.head_dim
        self._pack(node.outputs[0], node_after(node.outputs[0]), [-1, width])

    def recur(self, graph: ir.Graph, recurrent: Recurrent) -> None:
        """Give a convolution, and the recurrence behind it, their tokens row by row; both know how many count."""
        for node in (*nodes_of(graph, "CausalConv", LLMC), *nodes_of(graph, "LinearAttention", LLMC)):
            if node.name == f"{recurrent.name}.conv":
                self._unpack(node, [0])
                self._pack(node.outputs[0], node_after(node.outputs[0]), [-1, recurrent.channels])
            elif node.name == recurrent.name:
                self._unpack(node, [0, 1, 2, 4, 5])
                width = recurrent.value_heads * recurrent.value_dim
                self._pack(node.outputs[0], node_after(node.outputs[0]), [-1, width])

    def _unpack(self, node: ir.Node, inputs: Iterable[int]) -> None:
        """Let these inputs of a node, tokens that count [1, T, N], be rows with padding [B, S, N]."""
        emit = Emitter(node, f"{node.name}.packed")
        for index in inputs:
            if (value := node.inputs[index]) is not None:
                tokens = emit("Squeeze", value, vector(self.graph, [0]))
                node.replace_input_with(index, emit("Gather", tokens, self.slots, axis=0))

    def take_logit_rows(self) -> None:
        """Find the positions of which logits are wanted [B, O] among the tokens that count."""
        indices = graph_input(self.graph, "logit_indices")
        unsqueezed = sole_consumer(indices)
        gather = unsqueezed and sole_consumer(unsqueezed.outputs[0])
        if not gather or gather.op_type != "GatherND":
            raise BuildError("the graph does not gather rows by logit_indices; export the checkpoint again")
        emit = Emitter(gather, "packed.logit_rows")
        tokens = emit("Squeeze", gather.inputs[0], vector(self.graph, [0]))
        wanted = emit("GatherElements", self.slots, indices, axis=1)
        replace(gather, emit("Gather", tokens, wanted, axis=0))

    def _pack(self, value: ir.Value, before: ir.Node, shape: list[int], keep: Iterable[ir.Node] = ()) -> None:
        """Let readers of ``value`` [B, S, ...], as ``shape`` without rows, read [1, T, ...], made before ``before``."""
        kept, readers = {id(node) for node in keep}, list(value.uses())
        emit = Emitter(before, f"packed.{value.name}")
        flat = emit("Reshape", value, vector(self.graph, shape))
        packed = emit("Unsqueeze", emit("Gather", flat, self.places, axis=0), vector(self.graph, [0]))
        for node, index in readers:
            if id(node) not in kept:
                node.replace_input_with(index, packed)


def _list_producers(values: Iterable[ir.Value]) -> list[ir.Node]:
    producers: dict[int, ir.Node] = {}
    todo = list(values)
    while todo:
        node = todo.pop().producer()
        if node is not None and id(node) not in producers:
            producers[id(node)] = node
            todo += [value for value in node.inputs if value is not None]
    return list(producers.values())
