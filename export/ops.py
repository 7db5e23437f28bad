"""Semantic operators: each one's computation in torch and its equivalent ONNX function.

``llmc::CachedAttention`` is one node per layer in the exported graph. Its body is written in standard operators, so
any conforming runtime runs it, and a target replaces the node as a whole.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import onnx
import onnx.parser
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

DOMAIN = "llmc"
DOMAIN_VERSION = 1
OPSET = 24
CACHED_ATTENTION, SHARED_ATTENTION, SELF_ATTENTION = "CachedAttention", "SharedAttention", "SelfAttention"
ROTATED_HEADS = "RotatedHeads"
# Attributes that only some forms of an operator have.
FORMS = frozenset({"axes", "behind", "both_ways"})

# From positions (B, S) to cosines and sines (B, S, R/2).
_ANGLES = """
    positions_float = Cast <to = 1> (positions)
    positions_column = Unsqueeze (positions_float, axis_2)
    angles = Mul (positions_column, inv_freq)
    magnitude_float = Constant <value_float: float = @magnitude> ()
    cos_angles = Cos (angles)
    sin_angles = Sin (angles)
    cos = Mul (cos_angles, magnitude_float)
    sin = Mul (sin_angles, magnitude_float)
"""

# From positions (B, S) and projections to rotated heads (B, H or KV, S, D); part of both operators.
_TURNED_HEADS = (
    _ANGLES
    + """
    q_rotated = RotaryEmbedding
        <num_heads: int = @num_heads, rotary_embedding_dim: int = @rotary_dim, interleaved: int = @interleaved>
        (q, cos, sin)
    k_rotated = RotaryEmbedding
        <num_heads: int = @kv_heads, rotary_embedding_dim: int = @rotary_dim, interleaved: int = @interleaved>
        (k, cos, sin)

    one_float = Constant <value_float = 1.0> ()
    growth_float = Constant <value_float: float = @growth> ()
    period_float = Constant <value_float: float = @period> ()
    periods = Div (positions_float, period_float)
    whole_periods = Floor (periods)
    periods_begun = Add (whole_periods, one_float)
    logarithm = Log (periods_begun)
    grown = Mul (logarithm, growth_float)
    length = Add (grown, one_float)
    length_column = Unsqueeze (length, axis_2)
    q_grown = Mul (q_rotated, length_column)

    split = Concat <axis = 0> (merged, head_dim)
    q_split = Reshape (q_grown, split)
    k_split = Reshape (k_rotated, split)
    v_split = Reshape (v, split)
    q_heads = Transpose <perm = [0, 2, 1, 3]> (q_split)
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_split)
    v_heads = Transpose <perm = [0, 2, 1, 3]> (v_split)
"""
)

_PRODUCT = """
    heads_out = Attention <scale: float = @scale, softcap: float = @softcap> (q_heads, present_k, present_v, mask)
"""

# The part of a cache that queries at positions (B, S) see; the end of both operators that read one.
_SEEN = (
    """
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
"""
    + _PRODUCT
    + """
    attn_split = Transpose <perm = [0, 2, 1, 3]> (heads_out)
    attn = Reshape (attn_split, merged)
}
"""
)

# Shapes: q (B, S, H*D); k, v (B, S, KV*D); past and present (B, KV, C, D); past_lengths (B); inv_freq (R/2).
# The first R values of a head are rotated and the rest left as they are: value i with i + R/2, or, if interleaved, 2i
# with 2i + 1, turned by position * inv_freq[i] and made longer by the magnitude. Queries are multiplied by
# 1 + growth * ln(1 + floor(position / period)). A softcap c bounds a product s as c * tanh(s / c); 0 is none.
# Where ropes switch, inv_freq is (B, 1, R/2), of each row's text.
# A query at position p sees the cache slots 0..p, and with a window W only p-W+1..p. Every past_lengths + S must fit
# into C, and slots that were never written must hold finite numbers, for a masked NaN remains NaN.
_CACHED_ATTENTION = (
    """
<domain: "llmc", opset_import: ["" : 24]>
CachedAttention
    <num_heads, kv_heads, scale, window, softcap, rotary_dim, interleaved, magnitude, growth, period>
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
"""
    + _TURNED_HEADS
    + """
    present_k = TensorScatter <axis = 2> (past_k, k_heads, past_lengths)
    present_v = TensorScatter <axis = 2> (past_v, v_heads, past_lengths)
"""
    + _SEEN
)

# The same with sinks (H), a logit more for each head, whose share of the softmax falls away: it is the bias of one more
# key of zeros, whose value is zeros.
_SINKING_ATTENTION = _CACHED_ATTENTION.replace("past_lengths, inv_freq)", "past_lengths, sinks, inv_freq)").replace(
    _PRODUCT,
    """
    nothing = Constant <value_float = 0.0> ()
    least = Constant <value_float = -3.4e38> ()
    last_axis = Constant <value_ints = [-1]> ()
    axes_0_2_3 = Constant <value_ints = [0, 2, 3]> ()
    one_more = Constant <value_ints = [0, 0, 0, 0, 0, 0, 1, 0]> ()
    bias = Where (mask, nothing, least)
    sink_column = Unsqueeze (sinks, axes_0_2_3)
    nothing_by_head = Mul (sink_column, nothing)
    bias_by_head = Add (bias, nothing_by_head)
    zero_rows = ReduceMax (bias_by_head, last_axis)
    sink_rows = Add (zero_rows, sink_column)
    bias_and_sinks = Concat <axis = -1> (bias_by_head, sink_rows)
    keys = Pad (present_k, one_more)
    values = Pad (present_v, one_more)
    heads_out = Attention <scale: float = @scale> (q_heads, keys, values, bias_and_sinks)
    """,
)

# The same where positions (A, B, S) have several axes: pair i of a head turns by that of axis axes[i].
_TURNED_BY_AXES = (
    _CACHED_ATTENTION.replace("magnitude, growth, period>", "magnitude, growth, period, axes>")
    .replace("past_lengths, inv_freq)", "past_lengths, places, inv_freq)")
    .replace(
        "angles = Mul (positions_column, inv_freq)",
        """
    axis_of_pair = Constant <value_ints: ints = @axes> ()
    places_by_pair = Gather <axis = 0> (places, axis_of_pair)
    pairs_last = Transpose <perm = [1, 2, 0]> (places_by_pair)
    places_float = Cast <to = 1> (pairs_last)
    angles = Mul (places_float, inv_freq)
    """,
    )
)

# The same where some tokens also see the ``ahead`` (B, S) positions behind their own, if ``both_ways`` is 1; in layers
# where it is 0, none does.
_BOTH_WAYS_ATTENTION = (
    _CACHED_ATTENTION.replace("past_lengths, inv_freq)", "past_lengths, ahead, inv_freq)")
    .replace("growth, period>", "growth, period, both_ways>")
    .replace(
        "causal = LessOrEqual (slot_row, position_column)",
        """
    looks = Constant <value_int: int = @both_ways> ()
    ahead_here = Mul (ahead, looks)
    last = Add (positions, ahead_here)
    last_column = Unsqueeze (last, axes_1_3)
    causal = LessOrEqual (slot_row, last_column)
    """,
    )
)

# Queries q (B, S, H*D) of a layer without keys and values, at positions (B, S), over what another layer left in its
# cache (B, KV, C, D).
_SHARED_ATTENTION = (
    """
<domain: "llmc", opset_import: ["" : 24]>
SharedAttention
    <num_heads, kv_heads, scale, window, softcap, rotary_dim, interleaved, magnitude>
    (q, present_k, present_v, positions, inv_freq) => (attn)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_2 = Constant <value_ints = [2]> ()
    axes_1_3 = Constant <value_ints = [1, 3]> ()
    axes_0_1_2 = Constant <value_ints = [0, 1, 2]> ()
    merged = Constant <value_ints = [0, 0, -1]> ()
    capacity = Shape <start = 2, end = 3> (present_k)
    head_dim = Shape <start = 3, end = 4> (present_k)
    capacity_scalar = Squeeze (capacity, axis_0)
"""
    + _ANGLES
    + """
    q_rotated = RotaryEmbedding
        <num_heads: int = @num_heads, rotary_embedding_dim: int = @rotary_dim, interleaved: int = @interleaved>
        (q, cos, sin)
    split = Concat <axis = 0> (merged, head_dim)
    q_split = Reshape (q_rotated, split)
    q_heads = Transpose <perm = [0, 2, 1, 3]> (q_split)
"""
    + _SEEN
)

# The same over the cache of another model, which ends before the token of the query: it sees what lies before its own
# position, and with a window W the last W of that. Nodes of this form have the attribute ``behind``, which does no
# more.
_BORROWING_ATTENTION = _SHARED_ATTENTION.replace("interleaved, magnitude>", "interleaved, magnitude, behind>").replace(
    "position_column = Unsqueeze (positions, axes_1_3)",
    """
    last = Sub (positions, one)
    position_column = Unsqueeze (last, axes_1_3)
    """,
)

# The same for a whole text in one call: q (B, S, H*D); k, v (B, S, KV*D); lengths (B). A query sees the positions of
# its row's length; if causal, none after its own; and with a window W only those less than W away. A position beyond
# its row's length sees at least itself, so that its (unused) result is finite.
_SELF_ATTENTION = (
    """
<domain: "llmc", opset_import: ["" : 24]>
SelfAttention
    <num_heads, kv_heads, scale, window, softcap, rotary_dim, interleaved, magnitude, growth, period, causal>
    (q, k, v, lengths, inv_freq) => (attn)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    axes_0_1_2 = Constant <value_ints = [0, 1, 2]> ()
    axes_0_1_3 = Constant <value_ints = [0, 1, 3]> ()
    axes_1_2_3 = Constant <value_ints = [1, 2, 3]> ()
    merged = Constant <value_ints = [0, 0, -1]> ()

    sequence = Shape <start = 1, end = 2> (q)
    width = Shape <start = 2, end = 3> (q)
    heads = Constant <value_int: int = @num_heads> ()
    head_dim = Div (width, heads)
    sequence_scalar = Squeeze (sequence, axis_0)
    steps = Range (zero, sequence_scalar, one)
    nothing = Mul (lengths, zero)
    starts = Unsqueeze (nothing, axis_1)
    positions = Add (starts, steps)
"""
    + _TURNED_HEADS
    + """
    key_row = Unsqueeze (steps, axes_0_1_2)
    query_column = Unsqueeze (steps, axes_0_1_3)
    lengths_column = Unsqueeze (lengths, axes_1_2_3)
    inside_row = Less (key_row, lengths_column)
    distance = Sub (query_column, key_row)
    is_causal = Constant <value_int: int = @causal> ()
    any_order = Equal (is_causal, zero)
    before = GreaterOrEqual (distance, zero)
    ordered = Or (before, any_order)
    window_size = Constant <value_int: int = @window> ()
    unlimited = Equal (window_size, zero)
    apart = Abs (distance)
    near = Less (apart, window_size)
    inside_window = Or (near, unlimited)
    own = Equal (distance, zero)
    seen_in_row = And (inside_row, ordered)
    seen_in_window = And (seen_in_row, inside_window)
    mask = Or (seen_in_window, own)

    heads_out = Attention <scale: float = @scale, softcap: float = @softcap> (q_heads, k_heads, v_heads, mask)
    attn_split = Transpose <perm = [0, 2, 1, 3]> (heads_out)
    attn = Reshape (attn_split, merged)
}
"""
)

# The same with a bias (1, H, S, S) of the products of queries and keys.
_BIASED_ATTENTION = _SELF_ATTENTION.replace("lengths, inv_freq)", "lengths, bias, inv_freq)").replace(
    "heads_out = Attention <scale: float = @scale, softcap: float = @softcap> (q_heads, k_heads, v_heads, mask)",
    """
    least = Constant <value_float = -3.4e38> ()
    seen_bias = Where (mask, bias, least)
    heads_out = Attention <scale: float = @scale> (q_heads, k_heads, v_heads, seen_bias)
    """,
)

# Positions (A, B, S) on several axes, and the axis of each pair of a head.
Places = tuple[Tensor, tuple[int, ...]]


class Shown(NamedTuple):
    """Changes of attention by images: the places by which heads turn, and how many positions after its own each token
    sees (B, S) in layers that look ahead. None goes with the other or with sinks."""

    places: Places | None = None
    ahead: Tensor | None = None
    looks: bool = True


PLAIN = Shown()


@dataclass(frozen=True)
class Knobs:
    """The attributes of both operators, explained above; R is given by the number of frequencies."""

    num_heads: int
    kv_heads: int
    scale: float
    window: int
    softcap: float
    interleaved: bool
    magnitude: float
    growth: float
    period: float


# The rotation alone, where a norm stands between it and attention: x (B, S, H*D), past_lengths (B), inv_freq (R/2).
_ROTATED_HEADS = (
    """
<domain: "llmc", opset_import: ["" : 24]>
RotatedHeads <num_heads, rotary_dim, interleaved, magnitude> (x, past_lengths, inv_freq) => (rotated)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    sequence = Shape <start = 1, end = 2> (x)
    sequence_scalar = Squeeze (sequence, axis_0)
    steps = Range (zero, sequence_scalar, one)
    starts = Unsqueeze (past_lengths, axis_1)
    positions = Add (starts, steps)
"""
    + _ANGLES
    + """
    rotated = RotaryEmbedding
        <num_heads: int = @num_heads, rotary_embedding_dim: int = @rotary_dim, interleaved: int = @interleaved>
        (x, cos, sin)
}
"""
)


def functions() -> list[onnx.FunctionProto]:
    """The semantic operators as ONNX functions of standard operators (opset 24), some in two forms."""
    return [
        onnx.parser.parse_function(text)
        for text in (
            *(_CACHED_ATTENTION, _SINKING_ATTENTION, _TURNED_BY_AXES, _BOTH_WAYS_ATTENTION),
            *(_SHARED_ATTENTION, _BORROWING_ATTENTION, _SELF_ATTENTION),
            *(_BIASED_ATTENTION, _ROTATED_HEADS),
        )
    ]


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: tuple[Tensor, Tensor],
    past_lengths: Tensor,
    inv_freq: Tensor,
    knobs: Knobs,
    sinks: Tensor | None = None,
    shown: Shown = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, write k and v into the cache at ``past_lengths``, attend; ``sinks`` (H) are a logit more of each
    head, which a softcap does not go with.

    Returns attention (B, S, H*D) and the updated keys and values (B, KV, C, D). While torch exports, it emits one
    ``llmc::CachedAttention`` node instead of computing.
    """
    (past_k, past_v), (places, ahead, looks) = past, shown
    more = [each for each in (sinks, places and places[0], ahead) if each is not None]
    assert len(more) <= 1 and (sinks is None or not knobs.softcap)
    if not torch.compiler.is_exporting():
        positions = past_lengths[:, None] + torch.arange(q.shape[1], device=q.device)  # (B, S)
        turned = positions if places is None else places[0][list(places[1])].permute(1, 2, 0)  # (B, S, R/2)
        queries, new_keys, new_values = _rotate_projections(q, k, v, turned, inv_freq, knobs)
        keys, values = _scatter(past_k, new_keys, positions), _scatter(past_v, new_values, positions)  # (B, KV, C, D)
        mask = _mask(past_k.shape[2], positions, knobs, 0 if ahead is None or not looks else ahead)
        return _attend(queries, keys, values, mask, knobs, sinks), keys, values
    attributes = _attributes(inv_freq, knobs) | ({"axes": list(places[1])} if places else {})
    attributes |= {"both_ways": int(looks)} if ahead is not None else {}
    inputs = [q, k, v, past_k, past_v, past_lengths, *more, inv_freq]
    attn, present_k, present_v = emit_node(CACHED_ATTENTION, inputs, attributes, q, past_k, past_v)
    return attn, present_k, present_v


def shared_attention(
    q: Tensor,
    present: tuple[Tensor, Tensor],
    positions: Tensor,
    inv_freq: Tensor,
    knobs: Knobs,
    *,
    behind: bool = False,
) -> Tensor:
    """Rotate q (B, S, H*D) for its positions (B, S) and attend to a cache of another layer -> (B, S, H*D); if
    ``behind``, to one of another model, which ends before that position.

    While torch exports, it emits one ``llmc::SharedAttention`` node instead of computing.
    """
    if torch.compiler.is_exporting():
        numbers = _attributes(inv_freq, knobs)
        numbers = {name: value for name, value in numbers.items() if name not in ("growth", "period")}
        numbers |= {"behind": 1} if behind else {}
        return emit_node(SHARED_ATTENTION, [q, *present, positions, inv_freq], numbers, q)[0]
    queries = _rotate(_heads(q, q.shape[-1] // knobs.num_heads), positions, inv_freq, knobs)
    return _attend(queries, *present, _mask(present[0].shape[2], positions - int(behind), knobs), knobs)


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    inv_freq: Tensor,
    knobs: Knobs,
    *,
    causal: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Rotate q and k and attend within each row of a call up to its length (B) -> (B, S, H*D); ``bias`` (1, H, S, S) is
    added to the products, which a softcap does not go with.

    While torch exports, it emits one ``llmc::SelfAttention`` node instead of computing.
    """
    if torch.compiler.is_exporting():
        numbers = {**_attributes(inv_freq, knobs), "causal": int(causal)}
        more = [] if bias is None else [bias]
        return emit_node(SELF_ATTENTION, [q, k, v, lengths, *more, inv_freq], numbers, q)[0]
    places = torch.arange(q.shape[1], device=q.device)
    queries, keys, values = _rotate_projections(q, k, v, places[None], inv_freq, knobs)
    distance = places[:, None] - places  # (S, S), of a query from a key
    mask = places < lengths[:, None, None, None]  # (B, 1, 1, S)
    if causal:
        mask = mask & (distance >= 0)
    if knobs.window:
        mask = mask & (distance.abs() < knobs.window)
    mask = mask | (distance == 0)
    return _attend(queries, keys, values, mask if bias is None else bias.masked_fill(~mask, -torch.inf), knobs)


def rotated_heads(x: Tensor, past_lengths: Tensor, inv_freq: Tensor, knobs: Knobs, head_dim: int) -> Tensor:
    """Rotate heads x (B, S, H*D); while torch exports, it emits one ``llmc::RotatedHeads`` node instead."""
    if torch.compiler.is_exporting():
        shared = {name: _attributes(inv_freq, knobs)[name] for name in ("rotary_dim", "interleaved", "magnitude")}
        numbers = {"num_heads": x.shape[-1] // head_dim, **shared}
        return emit_node(ROTATED_HEADS, [x, past_lengths, inv_freq], numbers, x)[0]
    positions = past_lengths[:, None] + torch.arange(x.shape[1], device=x.device)  # (B, S)
    return _rotate(_heads(x, head_dim), positions, inv_freq, knobs).transpose(1, 2).flatten(2)


def patch_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend from every patch of a tile to all (T, P, H*D), or where ``mask`` (T, 1, P, P) is true; ``scale`` of the
    products is by default head_dim ** -0.5. While torch exports, it emits one standard node."""
    scale = (q.shape[-1] // heads) ** -0.5 if scale is None else scale
    if torch.compiler.is_exporting():
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, "scale": scale}
        inputs = [q, k, v] if mask is None else [q, k, v, mask]
        return torch.onnx.ops.symbolic("Attention", inputs, attributes, dtype=q.dtype, shape=q.shape)
    queries, keys, values = (_heads(x, x.shape[-1] // heads) for x in (q, k, v))
    return scaled_dot_product_attention(queries, keys, values, mask, scale=scale).transpose(1, 2).flatten(2)


def turn_patches(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate heads x (1, P, H*D) by cosines and sines (1, P, D/2); while torch exports, it emits one standard node."""
    if torch.compiler.is_exporting():
        inputs = [x, cos, sin]
        return torch.onnx.ops.symbolic("RotaryEmbedding", inputs, {"num_heads": heads}, dtype=x.dtype, shape=x.shape)
    first, second = _heads(x, x.shape[-1] // heads).chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.transpose(1, 2).flatten(2)


def take_positions(hidden: Tensor, indices: Tensor) -> Tensor:
    """Pick the rows ``indices`` (B, O) out of ``hidden`` (B, S, N) -> (B, O, N)."""
    index = indices.unsqueeze(-1)  # (B, O, 1)
    if not torch.compiler.is_exporting():
        return torch.take_along_dim(hidden, index, dim=1)
    shape = (*indices.shape, hidden.shape[-1])
    # GatherND needs one node; aten.gather would first expand the indices to (B, O, N).
    return torch.onnx.ops.symbolic("GatherND", [hidden, index], {"batch_dims": 1}, dtype=hidden.dtype, shape=shape)


def emit_node(operator: str, inputs: Sequence[Tensor], attributes: dict[str, Any], *like: Tensor) -> Sequence[Tensor]:
    """The outputs of one node of llmc's in the graph that torch exports, of the types and shapes of ``like``."""
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{operator}",
        inputs,
        attributes,
        dtypes=[each.dtype for each in like],
        shapes=[each.shape for each in like],
        version=DOMAIN_VERSION,
    )


def _attributes(inv_freq: Tensor, knobs: Knobs) -> dict[str, Any]:
    numbers = {name: int(value) if isinstance(value, bool) else value for name, value in asdict(knobs).items()}
    return {**numbers, "rotary_dim": 2 * inv_freq.shape[-1]}


def _rotate_projections(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, inv_freq: Tensor, knobs: Knobs
) -> tuple[Tensor, Tensor, Tensor]:
    """The projections as heads (B, H or KV, S, D), queries and keys rotated for positions (B or 1, S), or those of each
    pair (B, S, R/2), with which queries do not grow."""
    head_dim = q.shape[-1] // knobs.num_heads
    grown = q
    if positions.dim() == 2:
        grown = q * (1 + knobs.growth * torch.floor(positions.unsqueeze(2) / knobs.period).log1p())
    queries, keys = (_rotate(_heads(x, head_dim), positions, inv_freq, knobs) for x in (grown, k))
    return queries, keys, _heads(v, head_dim)


def _mask(capacity: int, positions: Tensor, knobs: Knobs, ahead: Tensor | int = 0) -> Tensor:
    """Slots of a cache that queries at positions (B, S) see, (B, 1, S, C), also ``ahead`` (B, S) after their own."""
    slots, column = torch.arange(capacity, device=positions.device), positions[:, None, :, None]
    mask = slots <= (positions + ahead)[:, None, :, None]
    return mask & (slots > column - knobs.window) if knobs.window else mask


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, knobs: Knobs, sinks: Tensor | None = None
) -> Tensor:
    """Attention (B, S, H*D) of queries (B, H, S, D) over keys and values (B, KV, C, D); ``mask`` is true where they are
    seen, or without softcap and sinks what is added to the products."""
    group, scale, softcap = knobs.num_heads // knobs.kv_heads, knobs.scale, knobs.softcap
    if not softcap and sinks is None:
        attention = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=group > 1)
        return attention.transpose(1, 2).flatten(2)
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # (B, H, C, D)
    if softcap:
        capped = softcap * torch.tanh(queries @ keys.mT * (scale / softcap))
        attention = capped.masked_fill(~mask, -torch.inf).softmax(-1) @ values
    else:
        assert sinks is not None
        products = (queries @ keys.mT * scale).masked_fill(~mask, -torch.inf)
        column = sinks.view(1, -1, 1, 1).expand(*products.shape[:-1], 1)
        attention = torch.cat((products, column), -1).softmax(-1)[..., :-1] @ values
    return attention.transpose(1, 2).flatten(2)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)  # (B, H, S, D)


def _rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, knobs: Knobs) -> Tensor:
    by_pair = positions if positions.dim() == 3 else positions.unsqueeze(-1)
    angles = (by_pair.float() * inv_freq).unsqueeze(1)  # (B, 1, S, R/2)
    cos, sin = angles.cos() * knobs.magnitude, angles.sin() * knobs.magnitude
    turned, rest = x.tensor_split([2 * inv_freq.shape[-1]], dim=-1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if knobs.interleaved else turned.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((torch.stack(pairs, -1).flatten(-2) if knobs.interleaved else torch.cat(pairs, -1), rest), -1)


def _scatter(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    index = positions[:, None, :, None].expand_as(new)  # (B, KV, S, D)
    return cache.scatter(2, index, new.to(cache.dtype))  # autocast computes some in another
