"""Tables of rotary position embeddings, a pair for each of the decoder's ropes."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.bundle.model.attention import Attention
from llmc.errors import BuildError
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import LLMC, constant, graph_input, initializer, nodes_of, remove_dead

Pair = tuple[ir.Value, ir.Value]
# The input with the texts' lengths, and the key of a graph's metadata for it and the length after which ropes switch.
TEXT_LENGTHS, SWITCH = "text_lengths", "switch"


@dataclass(frozen=True)
class Tables:
    """Cosine and sine [positions, R/2] for keys, and for queries, the same unless those grow with the position."""

    key: Pair
    query: Pair


def switch_factors(graph: ir.Graph, context: LoweringContext) -> int:
    """Let ropes with other factors for long texts have both sets [2, R/2], where the context holds long texts; returns
    how many do."""
    after = context.geometry.long_after
    if not 0 < after < context.limits.max_context:
        return fix_factors(graph, context)
    switches = _list_switches(graph)
    for node, frequencies in switches:
        both = np.stack([frequencies[name] for name in ("short", "long")])
        node.outputs[0].replace_all_uses_with(constant(graph, f"{node.name}.both.inv_freq", both))
    graph.meta[SWITCH] = graph_input(graph, TEXT_LENGTHS), after
    return len(switches)


def fix_factors(graph: ir.Graph, context: LoweringContext) -> int:
    """Give such ropes the factors of the longest text that the context holds, for texts of any length."""
    after = context.geometry.long_after
    if not after:
        return 0
    for node, frequencies in _list_switches(graph):
        name = "long" if context.limits.max_context > after else "short"
        node.outputs[0].replace_all_uses_with(constant(graph, f"{node.name}.{name}.inv_freq", frequencies[name]))
    remove_dead(graph)
    graph.inputs.remove(graph_input(graph, TEXT_LENGTHS))
    return 0


def _list_switches(graph: ir.Graph) -> list[tuple[ir.Node, dict[str, NDArray[np.float32]]]]:
    switches = []
    for node in nodes_of(graph, "Where"):
        values = [value.const_value for value in node.inputs[1:] if value is not None]
        if (node.name or "").startswith("rotary_emb.") and None not in values:
            long, short = (value.numpy().astype(np.float32) for value in values if value is not None)
            switches.append((node, {"short": short, "long": long}))
    return switches


def rotary_tables(node: ir.Node, context: LoweringContext, kind: ir.DataType | None = None) -> Tables | None:
    """The tables of a ``llmc::CachedAttention`` or ``SharedAttention`` in a type, by default the compute type; None
    without a rope.

    They cover the planned context and hold the rope's magnitude; all graphs and attentions with the same rope share
    them.
    """
    attention = context.attention(node)
    if attention.rope is None or attention.turned_before:
        return None
    magnitude, growth, period = (
        np.float32(node.attributes[name].as_float() if name in node.attributes else 0)
        for name in ("magnitude", "growth", "period")
    )
    positions = np.arange(context.table_rows, dtype=np.float32)
    kind = kind or context.type
    key = _pair(node.inputs[-1], context, kind, "", np.full_like(positions, magnitude))
    if not growth or context.limits.max_context <= period:
        return Tables(key, key)
    lengths = magnitude * (1 + growth * np.log1p(positions // period))
    return Tables(key, _pair(node.inputs[-1], context, kind, "query.", lengths))


def table_pair(node: ir.Node, context: LoweringContext) -> Pair:
    magnitude = np.float32(node.attributes["magnitude"].as_float())
    return _pair(node.inputs[2], context, context.type, "", np.full(context.table_rows, magnitude))


def rotations(graph: ir.Graph, context: LoweringContext) -> list[tuple[ir.Node, Attention]]:
    """Every ``llmc::RotatedHeads`` and the attention that it is a part of; BuildError if the inventory lists others."""
    nodes = list(nodes_of(graph, "RotatedHeads", LLMC))
    turned = [attention for attention in context.geometry.attentions if attention.turned_before]
    listed = [(f"{attention.name}.{part}_rope", attention) for attention in turned for part in "qk"]
    if [node.name for node in nodes] != [name for name, _ in listed]:
        raise BuildError(
            f"the graph rotates heads in {len(nodes)} nodes, and the manifest lists {len(listed)}; "
            "export the checkpoint again"
        )
    return [(node, attention) for node, (_, attention) in zip(nodes, listed, strict=True)]


def _pair(
    inv_freq: ir.Value | None, context: LoweringContext, kind: ir.DataType, prefix: str, lengths: NDArray[np.float32]
) -> Pair:
    """Tables whose rows are ``lengths`` [positions] long."""
    assert inv_freq is not None and inv_freq.name and inv_freq.const_value is not None
    graph = inv_freq.graph
    assert graph is not None
    frequencies = inv_freq.const_value.numpy().astype(np.float32)
    places = np.arange(len(lengths), dtype=np.float32)[:, None]
    if frequencies.ndim > 1:  # rows of short texts, then those of long ones
        after = context.geometry.long_after
        angles = np.concatenate([places[:after] * frequencies[0], places * frequencies[1]])
        lengths = np.concatenate([lengths[:after], lengths])
    else:
        angles = places * frequencies[None, :]
    rope = inv_freq.name.removesuffix("inv_freq") + prefix
    suffix = "" if kind == context.type else f".{kind.name.lower()}"  # a bundle may want both
    cos, sin = context.weights.add(
        [f"{rope}cos{suffix}", f"{rope}sin{suffix}"],
        lambda: [(table(angles) * lengths[:, None]).astype(kind.numpy()) for table in (np.cos, np.sin)],
        frequencies.tobytes() + lengths.tobytes(),
    )
    return initializer(graph, cos), initializer(graph, sin)
