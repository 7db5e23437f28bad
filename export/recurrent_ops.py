"""Semantic operators of recurrent mixers: each one's computation in torch and its equivalent ONNX function.

As of :mod:`llmc.export.ops`: any conforming runtime runs the function bodies, and a target replaces a node as a whole.
"""

from dataclasses import asdict, dataclass

import onnx
import onnx.parser
import torch
from torch import Tensor

from llmc.export.ops import emit_node

CAUSAL_CONV, LINEAR_ATTENTION = "CausalConv", "LinearAttention"

# x (B, S, C), weight (C, 1, K), past (B, K - 1, C): the last inputs before; new_lengths (B). Token i of a row is the
# sum of weight[:, 0, K - 1 - j] times the input j tokens before it. Present are the last K - 1 inputs of the row's
# ``new_lengths`` new ones and those before.
_CAUSAL_CONV = """
<domain: "llmc", opset_import: ["" : 24]>
CausalConv <channels> (x, weight, past, new_lengths) => (y, present)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axes_1_2 = Constant <value_ints = [1, 2]> ()
    axes_0_2 = Constant <value_ints = [0, 2]> ()
    joined = Concat <axis = 1> (past, x)
    columns = Transpose <perm = [0, 2, 1]> (joined)
    sums = Conv <group: int = @channels> (columns, weight)
    y = Transpose <perm = [0, 2, 1]> (sums)
    kept = Shape <start = 1, end = 2> (past)
    kept_scalar = Squeeze (kept, axis_0)
    steps = Range (zero, kept_scalar, one)
    step_column = Unsqueeze (steps, axes_0_2)
    lengths = Unsqueeze (new_lengths, axes_1_2)
    last = Add (lengths, step_column)
    present = GatherND <batch_dims = 1> (joined, last)
}
"""

# q, k (B, S, Hk*dk), v (B, S, Hv*dv), past and present (B, Hv, dk, dv), decay and beta (B, S, Hv), new_lengths (B).
# Neighbouring value heads share a key head. If unit_eps is above 0, queries and keys are divided by the root of their
# sum of squares and it. Token by token, and only for a row's first ``new_lengths``:
#     state = state * exp(decay);  state += k (beta * (v - delta * k^T state))^T;  y = scale * q^T state
_LINEAR_ATTENTION = """
<domain: "llmc", opset_import: ["" : 24]>
LinearAttention <key_heads, value_heads, scale, delta, unit_eps>
    (q, k, v, past, decay, beta, new_lengths) => (y, present)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_3 = Constant <value_ints = [3]> ()
    last_axis = Constant <value_ints = [-1]> ()
    rest = Constant <value_ints = [-1]> ()
    same = Constant <value_ints = [0, 0]> ()
    merged = Constant <value_ints = [0, 0, -1]> ()
    nothing = Constant <value_float = 0.0> ()
    factor = Constant <value_float: float = @scale> ()
    correction = Constant <value_float: float = @delta> ()
    eps = Constant <value_float: float = @unit_eps> ()

    key_count_scalar = Constant <value_int: int = @key_heads> ()
    value_count_scalar = Constant <value_int: int = @value_heads> ()
    key_count = Unsqueeze (key_count_scalar, axis_0)
    value_count = Unsqueeze (value_count_scalar, axis_0)
    group = Div (value_count, key_count)
    ones_2 = Constant <value_ints = [1, 1]> ()
    one_1 = Constant <value_ints = [1]> ()
    key_split = Concat <axis = 0> (same, key_count, rest)
    value_split = Concat <axis = 0> (same, value_count, rest)
    spread = Concat <axis = 0> (ones_2, one_1, group, one_1)
    q_own = Reshape (q, key_split)
    k_own = Reshape (k, key_split)
    q_squares = ReduceSumSquare <keepdims = 1> (q_own, last_axis)
    k_squares = ReduceSumSquare <keepdims = 1> (k_own, last_axis)
    q_sum = Add (q_squares, eps)
    k_sum = Add (k_squares, eps)
    q_length = Sqrt (q_sum)
    k_length = Sqrt (k_sum)
    q_divided = Div (q_own, q_length)
    k_divided = Div (k_own, k_length)
    is_unit = Greater (eps, nothing)
    q_unit = Where (is_unit, q_divided, q_own)
    k_unit = Where (is_unit, k_divided, k_own)
    q_apart = Unsqueeze (q_unit, axis_3)
    k_apart = Unsqueeze (k_unit, axis_3)
    q_spread = Expand (q_apart, spread)
    k_spread = Expand (k_apart, spread)
    q_heads = Reshape (q_spread, value_split)
    k_heads = Reshape (k_spread, value_split)
    v_heads = Reshape (v, value_split)

    sequence = Shape <start = 1, end = 2> (q)
    sequence_scalar = Squeeze (sequence, axis_0)
    steps = Range (zero, sequence_scalar, one)
    step_row = Unsqueeze (steps, axis_0)
    lengths = Unsqueeze (new_lengths, axis_1)
    counts = Less (step_row, lengths)
    counts_column = Unsqueeze (counts, last_axis)
    kept_decay = Where (counts_column, decay, nothing)
    kept_beta = Where (counts_column, beta, nothing)

    present, y_tokens = Scan <
        num_scan_inputs = 5,
        scan_input_axes = [1, 1, 1, 1, 1],
        scan_output_axes = [1],
        body = token (float[b, h, i, j] state, float[b, h, i] q_t, float[b, h, i] k_t, float[b, h, j] v_t,
                      float[b, h] g_t, float[b, h] b_t) => (float[b, h, i, j] state_out, float[b, h, j] y_t) {
            inner_last = Constant <value_ints = [-1]> ()
            inner_row = Constant <value_ints = [-2]> ()
            fade = Exp (g_t)
            fade_column = Unsqueeze (fade, inner_last)
            fade_matrix = Unsqueeze (fade_column, inner_last)
            faded = Mul (state, fade_matrix)
            k_row = Unsqueeze (k_t, inner_row)
            known_row = MatMul (k_row, faded)
            known = Squeeze (known_row, inner_row)
            known_part = Mul (known, correction)
            new = Sub (v_t, known_part)
            b_column = Unsqueeze (b_t, inner_last)
            scaled = Mul (new, b_column)
            k_column = Unsqueeze (k_t, inner_last)
            scaled_row = Unsqueeze (scaled, inner_row)
            added = MatMul (k_column, scaled_row)
            state_out = Add (faded, added)
            q_row = Unsqueeze (q_t, inner_row)
            read_row = MatMul (q_row, state_out)
            read = Squeeze (read_row, inner_row)
            y_t = Mul (read, factor)
        }
    > (past, q_heads, k_heads, v_heads, kept_decay, kept_beta)
    y = Reshape (y_tokens, merged)
}
"""


@dataclass(frozen=True)
class Knobs:
    """The attributes of ``llmc::LinearAttention``, explained above."""

    key_heads: int
    value_heads: int
    scale: float
    delta: bool
    unit_eps: float


def functions() -> list[onnx.FunctionProto]:
    """The semantic operators as ONNX functions of standard operators (opset 24)."""
    return [onnx.parser.parse_function(text) for text in (_CAUSAL_CONV, _LINEAR_ATTENTION)]


def causal_conv(x: Tensor, weight: Tensor, past: Tensor, new_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its inputs before -> (B, S, C), and what the next call needs of them.

    While torch exports, it emits one ``llmc::CausalConv`` node instead of computing.
    """
    if torch.compiler.is_exporting():
        inputs = [x, weight, past, new_lengths]
        y, present = emit_node(CAUSAL_CONV, inputs, {"channels": weight.shape[0]}, x, past)
        return y, present
    joined = torch.cat([past, x], 1)
    y = torch.nn.functional.conv1d(joined.mT, weight, groups=weight.shape[0]).mT
    last = new_lengths[:, None] + torch.arange(past.shape[1], device=x.device)
    return y, torch.take_along_dim(joined, last.unsqueeze(-1), dim=1)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor, decay: Tensor, beta: Tensor, new_lengths: Tensor, knobs: Knobs
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token -> (B, S, Hv*dv) and the state after each row's last token that counts.

    While torch exports, it emits one ``llmc::LinearAttention`` node instead of computing.
    """
    if torch.compiler.is_exporting():
        numbers = {**asdict(knobs), "delta": float(knobs.delta)}
        y, present = emit_node(LINEAR_ATTENTION, [q, k, v, past, decay, beta, new_lengths], numbers, v, past)
        return y, present
    queries, keys = (_spread(part, knobs) for part in (q, k))  # (B, S, Hv, dk)
    values = v.view(*v.shape[:-1], knobs.value_heads, -1)  # (B, S, Hv, dv)
    counts = (torch.arange(q.shape[1], device=q.device) < new_lengths[:, None]).unsqueeze(-1)
    fades, betas = torch.where(counts, decay, 0.0).exp(), torch.where(counts, beta, 0.0)
    state, outputs = past, []
    for t in range(q.shape[1]):
        state = state * fades[:, t, :, None, None]
        key = keys[:, t, :, :, None]
        new = values[:, t] - (key * state).sum(2) if knobs.delta else values[:, t]
        state = state + key * (betas[:, t, :, None] * new).unsqueeze(2)
        outputs.append((queries[:, t, :, :, None] * state).sum(2))
    return torch.stack(outputs, 1).flatten(-2) * knobs.scale, state


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), one node of the graph: what torch exports for its own compares with a threshold too."""
    if torch.compiler.is_exporting():
        return torch.onnx.ops.symbolic("Softplus", [x], dtype=x.dtype, shape=x.shape)
    return torch.nn.functional.softplus(x)


def _spread(part: Tensor, knobs: Knobs) -> Tensor:
    heads = part.view(*part.shape[:-1], knobs.key_heads, -1)
    if knobs.unit_eps:
        heads = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + knobs.unit_eps)
    return heads.repeat_interleave(knobs.value_heads // knobs.key_heads, 2)
