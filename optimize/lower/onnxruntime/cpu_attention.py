"""Attention for ONNX Runtime on CPUs."""

import numpy as np
import onnx_ir as ir

from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import group_query_attention
from llmc.optimize.lower.rewrite import Emitter, scalar


def lower_attention(graph: ir.Graph, context: LoweringContext) -> int:
    """llmc::CachedAttention -> GroupQueryAttention over the shared buffers, rotary tables as constants."""
    return group_query_attention(graph, context, _lengths)


def _lengths(graph: ir.Graph, first: ir.Node) -> list[ir.Value]:
    """``seqlens_k`` int32 [B] (total length - 1 of each row) and ``total_sequence_length`` int32 [] for all layers."""
    ids, past_lengths = (next(i for i in graph.inputs if i.name == name) for name in ("input_ids", "past_lengths"))
    emit = Emitter(first, "positions")
    sequence = emit("Shape", ids, start=1, end=2)
    totals = emit("Cast", emit("Add", past_lengths, sequence), to=ir.DataType.INT32)
    longest = emit("ReduceMax", totals, keepdims=0)
    return [emit("Sub", totals, scalar(graph, 1, np.int32)), longest]
