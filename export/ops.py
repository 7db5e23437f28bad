"""Semantic operators: what torch computes eagerly, and the ONNX function that means the same.

``llmc::CachedAttention`` is one node per layer in the exported graph. Its body is written in standard operators, so
any conforming runtime runs it, and a target replaces the node as a whole.
"""

import onnx
import onnx.parser
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

DOMAIN = "llmc"
DOMAIN_VERSION = 1
OPSET = 24
CACHED_ATTENTION = "CachedAttention"

# Shapes: q (B, S, H*D); k, v (B, S, KV*D); past and present (B, KV, C, D); past_lengths (B); inv_freq (D/2).
# A query at position p sees the cache slots 0..p, and with a window W only p-W+1..p. Every past_lengths + S must fit
# into C, and slots that were never written must hold finite numbers: a masked NaN is still a NaN.
_CACHED_ATTENTION = """
<domain: "llmc", opset_import: ["" : 24]>
CachedAttention <num_heads, kv_heads, scale, window>
    (q, k, v, past_k, past_v, past_lengths, inv_freq) => (attn, present_k, present_v)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    axes_1_3 = Constant <value_ints = [1, 3]> ()
    axes_0_1_2 = Constant <value_ints = [0, 1, 2]> ()
    merged = Constant <value_ints = [0, 0, -1]> ()

    sequence = Shape <start = 1, end = 2> (q)
    capacity = Shape <start = 2, end = 3> (past_k)
    head_dim = Shape <start = 3, end = 4> (past_k)
    sequence_scalar = Squeeze (sequence, axis_0)
    capacity_scalar = Squeeze (capacity, axis_0)

    steps = Range (zero, sequence_scalar, one)
    starts = Unsqueeze (past_lengths, axis_1)
    positions = Add (starts, steps)
    positions_float = Cast <to = 1> (positions)
    positions_column = Unsqueeze (positions_float, axis_2)
    angles = Mul (positions_column, inv_freq)
    cos = Cos (angles)
    sin = Sin (angles)
    q_rotated = RotaryEmbedding <num_heads: int = @num_heads> (q, cos, sin)
    k_rotated = RotaryEmbedding <num_heads: int = @kv_heads> (k, cos, sin)

    split = Concat <axis = 0> (merged, head_dim)
    q_split = Reshape (q_rotated, split)
    k_split = Reshape (k_rotated, split)
    v_split = Reshape (v, split)
    q_heads = Transpose <perm = [0, 2, 1, 3]> (q_split)
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_split)
    v_heads = Transpose <perm = [0, 2, 1, 3]> (v_split)
    present_k = TensorScatter <axis = 2> (past_k, k_heads, past_lengths)
    present_v = TensorScatter <axis = 2> (past_v, v_heads, past_lengths)

    slots = Range (zero, capacity_scalar, one)
    slot_row = Unsqueeze (slots, axes_0_1_2)
    position_column = Unsqueeze (positions, axes_1_3)
    causal = LessOrEqual (slot_row, position_column)
    window_size = Constant <value_int: int = @window> ()
    unlimited = Equal (window_size, zero)
    oldest = Sub (position_column, window_size)
    recent = Greater (slot_row, oldest)
    inside = Or (recent, unlimited)
    mask = And (causal, inside)

    heads_out = Attention <scale: float = @scale> (q_heads, present_k, present_v, mask)
    attn_split = Transpose <perm = [0, 2, 1, 3]> (heads_out)
    attn = Reshape (attn_split, merged)
}
"""


def cached_attention_function() -> onnx.FunctionProto:
    """The ONNX meaning of ``llmc::CachedAttention``, in standard operators of opset 24."""
    return onnx.parser.parse_function(_CACHED_ATTENTION)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: tuple[Tensor, Tensor],
    past_lengths: Tensor,
    inv_freq: Tensor,
    *,
    num_heads: int,
    kv_heads: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, write k and v into the cache at ``past_lengths``, attend.

    Returns attention (B, S, H*D) and the updated keys and values (B, KV, C, D). While torch exports, it emits one
    ``llmc::CachedAttention`` node instead of computing.
    """
    past_k, past_v = past
    if not torch.compiler.is_exporting():
        return _attend(q, k, v, past, past_lengths, inv_freq, num_heads // kv_heads, scale, window)
    attn, present_k, present_v = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{CACHED_ATTENTION}",
        [q, k, v, past_k, past_v, past_lengths, inv_freq],
        {"num_heads": num_heads, "kv_heads": kv_heads, "scale": scale, "window": window},
        dtypes=[q.dtype, past_k.dtype, past_v.dtype],
        shapes=[q.shape, past_k.shape, past_v.shape],
        version=DOMAIN_VERSION,
    )
    return attn, present_k, present_v


def take_positions(hidden: Tensor, indices: Tensor) -> Tensor:
    """Pick the rows ``indices`` (B, O) out of ``hidden`` (B, S, N) -> (B, O, N)."""
    index = indices.unsqueeze(-1)  # (B, O, 1)
    if not torch.compiler.is_exporting():
        return torch.take_along_dim(hidden, index, dim=1)
    shape = (*indices.shape, hidden.shape[-1])
    # GatherND says it in one node; aten.gather would first expand the indices to (B, O, N).
    return torch.onnx.ops.symbolic("GatherND", [hidden, index], {"batch_dims": 1}, dtype=hidden.dtype, shape=shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: tuple[Tensor, Tensor],
    past_lengths: Tensor,
    inv_freq: Tensor,
    group: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim, capacity = past[0].shape[-1], past[0].shape[2]
    positions = past_lengths[:, None] + torch.arange(q.shape[1], device=q.device)  # (B, S)
    angles = positions[:, None, :, None].float() * inv_freq  # (B, 1, S, D/2)
    queries = _rotate(_heads(q, head_dim), angles)  # (B, H, S, D)
    keys = _scatter(past[0], _rotate(_heads(k, head_dim), angles), positions)  # (B, KV, C, D)
    values = _scatter(past[1], _heads(v, head_dim), positions)
    slots = torch.arange(capacity, device=q.device)
    mask = slots <= positions[:, None, :, None]  # (B, 1, S, C)
    if window:
        mask &= slots > positions[:, None, :, None] - window
    repeated_keys, repeated_values = (cache.repeat_interleave(group, dim=1) for cache in (keys, values))  # (B, H, C, D)
    attention = scaled_dot_product_attention(queries, repeated_keys, repeated_values, attn_mask=mask, scale=scale)
    return attention.transpose(1, 2).flatten(2), keys, values


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)  # (B, H, S, D)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _scatter(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    index = positions[:, None, :, None].expand_as(new)  # (B, KV, S, D)
    return cache.scatter(2, index, new)
