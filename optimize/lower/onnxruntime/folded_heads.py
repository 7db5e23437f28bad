"""Steps of one token in each row: the heads that share keys and values become queries of one position.

GroupQueryAttention multiplies keys with one head after the other where a row has one token, and together where it has
several. So the query heads of a group are given as tokens of the row, all at its position: the new key is written as
often, and a bias hides all of them but the first. What a step writes beyond its token, the next one writes over.
"""

from typing import Any

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import AHEAD, GQA
from llmc.optimize.lower.rewrite import MICROSOFT, Emitter, constant, graph_input, nodes_of, replace, scalar, vector


class Branch(Emitter):
    """Emits nodes of a branch, a graph of its own inside If."""

    def __init__(self, anchor: ir.Node, name: str) -> None:
        super().__init__(anchor, f"{anchor.name}.{name}")
        self.nodes: list[ir.Node] = []

    def many(
        self, op: str, inputs: list[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        made = super().many(op, inputs, outputs, domain, **attributes)
        node = made[0].producer()
        assert node is not None
        self.nodes.append(node)
        return made


def fold_heads(graph: ir.Graph, context: LoweringContext) -> int:
    """GroupQueryAttention -> If(one token in each row, the same with folded heads, as it was)."""
    if not context.overwritten or context.phase == "prefill" or AHEAD in graph.meta:
        return 0
    attentions = [(node, context.geometry.attention[node.name or ""]) for node in nodes_of(graph, GQA, MICROSOFT)]
    folded = [(node, attention) for node, attention in attentions if attention.folds]
    if not folded:
        return 0
    emit = Emitter(folded[0][0], "single")  # true if each row has one token
    tokens = emit("Squeeze", emit("Shape", graph_input(graph, "input_ids"), start=1, end=2))
    single = emit("Equal", tokens, scalar(graph, 1, np.int64))
    sizes, dtype = sorted({item.group_size for _, item in folded}), context.attention_type.numpy()
    groups = {size: _Group(folded[0][0], size, dtype) for size in sizes}
    for node, attention in folded:
        branch = Branch(node, "folded")
        choose(node, single, branch, _emit_folded(branch, attention, groups[attention.group_size]), "several")
    return len(folded)


def choose(node: ir.Node, condition: ir.Value, then: Branch, outputs: list[ir.Value], otherwise: str) -> list[ir.Value]:
    """A node -> If(condition, ``outputs`` of the nodes of ``then``, the node as it was)."""
    together, count = _graph(then.name, then.nodes, outputs), len(outputs)
    own = ir.node(node.op_type, node.inputs, dict(node.attributes), domain=node.domain, num_outputs=count)
    own.name = f"{node.name}.{otherwise}"
    for value, output in zip(own.outputs, node.outputs, strict=True):
        value.name = f"{output.name}.{otherwise}"
    apart = _graph(own.name, [own], list(own.outputs))
    made = Emitter(node, main="If").many("If", [condition], count, then_branch=together, else_branch=apart)
    replace(node, *made)
    return made


def count_overwritten(attentions: tuple[Attention, ...]) -> int:
    """Positions behind a step's token that its folded heads write over."""
    return max((attention.group_size - 1 for attention in attentions if attention.folds), default=0)


def _graph(name: str, nodes: list[ir.Node], outputs: list[ir.Value]) -> ir.Graph:
    """A branch of these nodes, taken out of the graph that they are in."""
    for node in nodes:
        if node.graph is not None:
            node.graph.remove(node)
    return ir.Graph([], outputs, nodes=nodes, name=name)


class _Group:
    """Values that layers with groups of one size share, made in front of the first.

    Attributes:
        positions: of each query, int64 [B, G].
        lengths, total: ``seqlens_k`` and ``total_sequence_length`` with a key for each query.
        counts: queries of each row, int32 [B].
        bias: [B, 1, G, T] in the type of attention; hides all keys behind the new token's first.
    """

    def __init__(self, first: ir.Node, size: int, dtype: np.dtype[Any]) -> None:
        emit = Emitter(first, f"fold_{size}")
        graph, lengths, total = emit.graph, first.inputs[5], first.inputs[6]
        past = emit("Unsqueeze", graph_input(graph, "past_lengths"), vector(graph, [1]))
        self.positions = emit("Expand", past, vector(graph, [1, size]))
        more = scalar(graph, size - 1, np.int32)
        self.lengths, self.total = emit("Add", lengths, more), emit("Add", total, more)
        self.counts = emit("Expand", vector(graph, [size], np.int32), emit("Shape", lengths))
        keys = emit("Range", scalar(graph, 0, np.int32), self.total, scalar(graph, 1, np.int32))
        seen = emit("LessOrEqual", keys, emit("Unsqueeze", lengths, vector(graph, [1, 2, 3])))  # (B, 1, 1, T)
        # Copies of the new key: hidden by the least float16, too, for they have the score of their first.
        hidden = emit("Where", seen, scalar(graph, 0.0, dtype), scalar(graph, float(np.finfo(dtype).min), dtype))
        self.bias = emit("Expand", hidden, vector(graph, [1, 1, size, 1]))


def _emit_folded(emit: Branch, attention: Attention, group: _Group) -> list[ir.Value]:
    """Outputs of the attention before which ``emit`` emits, for a call of one token in each row."""
    graph, node, kv_heads, width = emit.graph, emit.anchor, attention.kv_heads, attention.head_dim
    packed, key, value, past_key, past_value = node.inputs[:5]
    size, rotates = attention.group_size, node.attributes["do_rotary"].as_int()
    if key is not None:
        packed = emit("Concat", packed, key, value, axis=-1)
    heads = emit("Reshape", packed, vector(graph, [0, -1, width]))
    # Heads of each folded token: one query head of every group, then all key and value heads, [G, 3 * KV].
    both = kv_heads * size + np.arange(2 * kv_heads)
    listed = np.array([[*(np.arange(kv_heads) * size + query), *both] for query in range(size)], np.int64)
    chosen = constant(graph, f"const.heads.{kv_heads}.{size}", listed)
    tokens = emit("Gather", heads, chosen, axis=1)  # (B, G, 3 * KV, D)
    tokens = emit("Reshape", tokens, vector(graph, [0, size, 3 * kv_heads * width]))
    tables = [*node.inputs[7:9], group.positions] if rotates else [None] * 3
    attended, *present = emit.many(
        GQA,
        [tokens, None, None, past_key, past_value, group.lengths, group.total, *tables, group.bias]
        + [None] * 5  # no sinks, scales of the cache or norms
        + [group.counts],
        3,
        MICROSOFT,
        num_heads=kv_heads,
        kv_num_heads=kv_heads,
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes["softcap"].as_float(),
        do_rotary=rotates,
        rotary_interleaved=node.attributes["rotary_interleaved"].as_int(),
    )
    apart = emit("Reshape", attended, vector(graph, [0, size, kv_heads, width]))
    together = emit("Transpose", apart, perm=[0, 2, 1, 3])
    return [emit("Reshape", together, vector(graph, [0, 1, attention.heads * width])), *present]
