"""A step of one token alone: the heads that share keys and values are queries of one position, as attention likes them.

GroupQueryAttention multiplies the keys with one query head after the other when a call has one token, which takes most
of a step in long contexts. Several tokens of a call it multiplies together. So for a lone token the key and the value
are written into the cache first, and the query heads of a group are given as that many tokens, without keys of their
own, each of which sees all that the cache holds.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from llmc.inventory import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import (
    MICROSOFT,
    Emitter,
    constant,
    graph_input,
    nodes_of,
    replace,
    scalar,
    vector,
)

# Positions from which it is done: at 128 it costs as much as it saves, and so few that the prompts which check a bundle
# reach them. The kernel wants as many positions as there are queries, so no group may be larger.
FROM_POSITIONS = 32
GQA = "GroupQueryAttention"


class _Branch(Emitter):
    """Emits nodes that become a graph of their own, which runs or does not."""

    def __init__(self, anchor: ir.Node) -> None:
        super().__init__(anchor, f"{anchor.name}.lone")
        self.nodes: list[ir.Node] = []

    def many(
        self, op: str, inputs: list[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """Insert a node with several outputs, and remember it."""
        made = super().many(op, inputs, outputs, domain, **attributes)
        node = made[0].producer()
        assert node is not None
        self.nodes.append(node)
        return made


def fold_lone_steps(graph: ir.Graph, context: LoweringContext) -> int:
    """GroupQueryAttention -> If(one token after many, the same with folded heads, as it was)."""
    if not context.folds_lone_steps or context.phase != "decode":
        return 0
    attentions = [(node, context.geometry.attention[node.name or ""]) for node in nodes_of(graph, GQA, MICROSOFT)]
    folded = [(node, attention) for node, attention in attentions if foldable(attention, context.cache)]
    if not folded:
        return 0
    shared = _Shared(folded)
    for node, attention in folded:
        emit = _Branch(node)
        lone = _graph(f"{node.name}.lone", emit.nodes, _folded(emit, attention, shared))
        several = ir.node(GQA, node.inputs, dict(node.attributes), domain=MICROSOFT, num_outputs=3)
        several.name = f"{node.name}.several"
        for value, output in zip(several.outputs, node.outputs, strict=True):
            value.name = f"{output.name}.several"
        otherwise = _graph(several.name, [several], list(several.outputs))
        choose = Emitter(node, main="If")
        replace(node, *choose.many("If", [shared.lone], 3, then_branch=lone, else_branch=otherwise))
    return len(folded)


def foldable(attention: Attention, cache: str) -> bool:
    """True for heads in groups, no larger than what calls have behind them, without a window or a quantized cache."""
    group = attention.heads // attention.kv_heads
    return cache == "float32" and 1 < group <= FROM_POSITIONS and not attention.window


def _graph(name: str, nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Graph:
    """A branch of these nodes, taken out of the graph that they are in."""
    for node in nodes:
        if node.graph is not None:
            node.graph.remove(node)
    return ir.Graph([], outputs, nodes=nodes, name=name)


class _Shared:
    """Values that layers share, made in front of the first: the choice, and the position in the shapes of each."""

    def __init__(self, folded: list[tuple[ir.Node, Attention]]) -> None:
        first = folded[0][0]
        emit = self._emit = Emitter(first, "lone_step")
        self._graph = emit.graph
        past, total = graph_input(self._graph, "past_lengths"), first.inputs[6]
        one = emit("Equal", emit("Size", graph_input(self._graph, "input_ids")), scalar(self._graph, 1, np.int64))
        self.lone = emit("And", one, emit("GreaterOrEqual", total, scalar(self._graph, FROM_POSITIONS, np.int32)))
        # Of the first row: there is no other where this is used, and where it is not there must be no error.
        self.position = emit("Reshape", emit("Gather", past, vector(self._graph, [0])), vector(self._graph, [1, 1]))
        groups = {attention.heads // attention.kv_heads for node, attention in folded if _rotates(node)}
        self.queries = {group: self._query_positions(group) for group in sorted(groups)}
        """The position for each query of a group, int64 [1, G], by G."""
        heads = {attention.kv_heads for _, attention in folded}
        self.places = {kv_heads: self._cache_places(kv_heads) for kv_heads in sorted(heads)}
        """The place of the new token's heads in the cache, int64 [1, KV, 1, 3], by KV."""

    def _query_positions(self, group: int) -> ir.Value:
        return self._emit("Expand", self.position, vector(self._graph, [1, group]))

    def _cache_places(self, kv_heads: int) -> ir.Value:
        heads = np.zeros((1, kv_heads, 1, 2), np.int64)
        heads[0, :, 0, 1] = np.arange(kv_heads)
        wide = self._emit("Expand", self.position, vector(self._graph, [1, kv_heads, 1, 1]))
        return self._emit("Concat", constant(self._graph, f"const.heads.{kv_heads}", heads), wide, axis=-1)


def _rotates(attention: ir.Node) -> int:
    return attention.attributes["do_rotary"].as_int()


def _folded(emit: Emitter, attention: Attention, shared: _Shared) -> list[ir.Value]:
    """Outputs of the attention before which ``emit`` emits, for a call of one token."""
    graph, node, kv_heads = emit.graph, emit.anchor, attention.kv_heads
    query, key, value, past_key, past_value, lengths, total = node.inputs[:7]
    tables, rotates, width = list(node.inputs[7:9]), _rotates(node), attention.head_dim
    group = attention.heads // kv_heads
    if key is None:  # packed
        sizes = vector(graph, [attention.heads * width, kv_heads * width, kv_heads * width])
        query, key, value = emit.many("Split", [query, sizes], 3, axis=-1)
    if rotates:
        key = emit(
            "RotaryEmbedding",
            *(key, shared.position, *tables),
            domain=MICROSOFT,
            num_heads=kv_heads,
            rotary_embedding_dim=attention.rotary_dim,
            interleaved=node.attributes["rotary_interleaved"].as_int(),
        )
    places, split = shared.places[kv_heads], vector(graph, [1, kv_heads, 1, width])
    present = [
        emit("ScatterND", past, places, emit("Reshape", part, split))
        for past, part in ((past_key, key), (past_value, value))
    ]
    start = vector(graph, [0])
    nothing = emit("Slice", key, start, start, vector(graph, [1]))  # (1, 0, KV * D)
    apart = emit("Reshape", query, vector(graph, [1, kv_heads, group, width]))
    folded = emit("Reshape", emit("Transpose", apart, perm=[0, 2, 1, 3]), vector(graph, [1, group, kv_heads * width]))
    attended = emit(
        GQA,
        *(folded, nothing, nothing, *present, lengths, total, *((*tables, shared.queries[group]) if rotates else ())),
        domain=MICROSOFT,
        num_heads=kv_heads,
        kv_num_heads=kv_heads,
        causal=0,
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes["softcap"].as_float(),
        do_rotary=rotates,
        rotary_interleaved=node.attributes["rotary_interleaved"].as_int(),
    )
    apart = emit("Reshape", attended, vector(graph, [1, group, kv_heads, width]))
    together = emit("Transpose", apart, perm=[0, 2, 1, 3])
    return [emit("Reshape", together, vector(graph, [1, 1, attention.heads * width])), *present]
