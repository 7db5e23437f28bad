"""Attention over a cache in basic operators, where GroupQueryAttention has no kernel, or a slow one."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnx_ir as ir

from llmc.bundle.model.attention import Attention
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.onnxruntime.attention import emit_attention, emit_rotation, rotate, token_positions
from llmc.optimize.lower.rewrite import Emitter, scalar, vector
from llmc.optimize.lower.rotary import rotary_tables


class Provider(Protocol):
    """A provider's way to write and read caches [B, KV, C, D]."""

    def slots(self, emit: Emitter) -> ir.Value:
        """The number of positions that are read, int64 [1], called T below."""

    def write_cache(self, emit: Emitter, past: ir.Value | None, heads: ir.Value, positions: ir.Value) -> ir.Value:
        """A cache with new heads [B, KV, S, D] in it at ``positions`` int64 [B, S], in place where past and present
        share their memory."""

    def read(self, emit: Emitter, present: ir.Value) -> ir.Value:
        """The part of a cache that is read, [B, KV, T, D]."""


@dataclass(frozen=True)
class Shared:
    """Values that all layers use: positions int64 [B, S], the last that each sees as columns [B, 1, 1, S, 1], slots
    [T], masks by window."""

    provider: Provider
    positions: ir.Value
    columns: ir.Value
    slots: ir.Value
    masks: dict[int, ir.Value] = field(default_factory=dict)

    @classmethod
    def before(cls, first: ir.Node, provider: Provider, positions: ir.Value | None = None) -> "Shared":
        """Compute the values before ``first``, for it and all attentions after it; ``positions`` default to those of
        the call's tokens."""
        assert first.graph is not None
        positions = positions or token_positions(first.graph, first)
        emit = Emitter(first, "positions")
        zero, one = (scalar(first.graph, value, np.int64) for value in (0, 1))
        slots = emit("Range", zero, emit("Squeeze", provider.slots(emit)), one)
        last = emit("Add", positions, first.inputs[6]) if "both_ways" in first.attributes else positions
        last = emit("Sub", positions, one) if "behind" in first.attributes else last
        return cls(provider, positions, emit("Unsqueeze", last, vector(first.graph, [1, 2, 4])), slots)


def basic_attention(node: ir.Node, shared: Shared, context: LoweringContext) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Attention [B, S, H * D] and the cache [B, KV, C, D] with the new keys and values in it."""
    query, key, value, past_key, past_value = node.inputs[:5]
    emit, attention, provider = Emitter(node), context.attention(node), shared.provider
    if tables := rotary_tables(node, context):
        query, key = emit_rotation(emit, attention, (query, key), shared.positions, tables)
    split = vector(emit.graph, [0, 0, attention.kv_heads, attention.head_dim])
    present_key, present_value = (
        provider.write_cache(
            emit, past, emit("Transpose", emit("Reshape", part, split), perm=[0, 2, 1, 3]), shared.positions
        )
        for past, part in ((past_key, key), (past_value, value))
    )
    return _attend(emit, attention, query, (present_key, present_value), shared), present_key, present_value


def shared_attention(node: ir.Node, shared: Shared, context: LoweringContext) -> ir.Value:
    """Attention [B, S, H * D] over what another layer left in its cache."""
    query, present_key, present_value = node.inputs[:3]
    emit, attention, tables = Emitter(node), context.attention(node), rotary_tables(node, context)
    assert tables is not None and present_key is not None and present_value is not None
    query = rotate(emit, attention.rotary_dim, attention.heads, query, shared.positions, tables.query)
    return _attend(emit, attention, query, (present_key, present_value), shared)


def _attend(
    emit: Emitter, attention: Attention, query: ir.Value | None, presents: tuple[ir.Value, ir.Value], shared: Shared
) -> ir.Value:
    keys, values = (
        emit("Unsqueeze", shared.provider.read(emit, present), vector(emit.graph, [2])) for present in presents
    )  # (B, KV, 1, T, D)
    return emit_attention(emit, attention, query, keys, values, _mask(emit, shared, attention.window))


def _mask(emit: Emitter, shared: Shared, window: int) -> ir.Value:
    """Cache slots that a position sees, bool [B, 1, 1, S, T]: all up to its own, or the last ``window`` of those."""
    if window not in shared.masks:
        mask = emit("LessOrEqual", shared.slots, shared.columns)
        if window:
            oldest = emit("Sub", shared.columns, scalar(emit.graph, window, np.int64))
            mask = emit("And", mask, emit("Greater", shared.slots, oldest))
        shared.masks[window] = mask
    return shared.masks[window]
