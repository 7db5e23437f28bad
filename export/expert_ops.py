"""The semantic operator of mixtures of experts: its computation in torch and its equivalent ONNX function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.parser
import torch
from torch import Tensor
from torch.nn import functional

from llmc.bundle.model.experts import ExpertActivation
from llmc.export.ops import emit_node

EXPERTS = "Experts"

# x (B, S, N), scores and weights (B, S, E), gate_up (E, 2*I, N): first the rows of the gate, down (E, N, I). Each token
# goes through the ``chosen`` experts that score highest, of equal ones the first; y is the sum of
# down(silu(gate x) * up x) times their weights, which, if ``normalized``, are divided by their sum.
_EXPERTS = """
<domain: "llmc", opset_import: ["" : 24]>
Experts <chosen, normalized> (x, scores, weights, gate_up, down) => (y)
{
    one = Constant <value_int = 1> ()
    axis_0 = Constant <value_ints = [0]> ()
    last_axis = Constant <value_ints = [-1]> ()
    nothing = Constant <value_float = 0.0> ()
    most_scalar = Constant <value_int: int = @chosen> ()
    most = Unsqueeze (most_scalar, axis_0)
    best, indices = TopK <axis = -1> (scores, most)
    picked = GatherElements <axis = -1> (weights, indices)
    total = ReduceSum (picked, last_axis)
    shares = Div (picked, total)
    wanted = Constant <value_int: int = @normalized> ()
    is_normalized = Equal (wanted, one)
    factors = Where (is_normalized, shares, picked)

    shape = Shape (x)
    zeros = Expand (nothing, shape)
    count = Shape <start = 0, end = 1> (gate_up)
    count_scalar = Squeeze (count, axis_0)
    always = Equal (one, one)
    y = Loop <
        body = expert (int64 e, bool going, float[b, s, n] sum) => (bool still, float[b, s, n] sum_out) {
            still = Identity (going)
            from_0 = Constant <value_ints = [0]> ()
            to_2 = Constant <value_ints = [2]> ()
            along_1 = Constant <value_ints = [1]> ()
            is_chosen = Equal (indices, e)
            places = NonZero (is_chosen)
            cells = Transpose <perm = [1, 0]> (places)
            tokens = Slice (cells, from_0, to_2, along_1)
            read = GatherND (x, tokens)
            gate_up_stored = Gather <axis = 0> (gate_up, e)
            gate_up_float = CastLike (gate_up_stored, x)
            gate_up_turned = Transpose <perm = [1, 0]> (gate_up_float)
            both = MatMul (read, gate_up_turned)
            gate, up = Split <axis = -1, num_outputs = 2> (both)
            opening = Sigmoid (gate)
            active = Mul (gate, opening)
            inner = Mul (active, up)
            down_stored = Gather <axis = 0> (down, e)
            down_float = CastLike (down_stored, x)
            down_turned = Transpose <perm = [1, 0]> (down_float)
            made = MatMul (inner, down_turned)
            factor = GatherND (factors, cells)
            column = Unsqueeze (factor, along_1)
            weighed = Mul (made, column)
            sum_out = ScatterND <reduction = "add"> (sum, tokens, weighed)
        }
    > (count_scalar, always, zeros)
}
"""


def _edit(text: str, *changes: tuple[str, str]) -> str:
    """``text`` with the first occurrence of each passage, which must be there, replaced."""
    for before, after in changes:
        assert before in text, f"the function lacks: {before}"
        text = text.replace(before, after, 1)
    return text


# The same with gelu, approximated by tanh, in the place of silu.
_GELU = _edit(
    _EXPERTS,
    ("normalized>", "normalized, activation>"),
    ("            opening = Sigmoid (gate)\n", ""),
    ("Mul (gate, opening)", 'Gelu <approximate = "tanh"> (gate)'),
)

# The same as the first with biases (E, 2*I) and (E, N), the rows of gate and up in turn, and another activation, as of
# gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), where gate is at most the limit, and up between it and its negative.
_CLAMPED = _edit(
    _EXPERTS,
    ("chosen, normalized>", "chosen, normalized, alpha, limit>"),
    ("gate_up, down)", "gate_up, down, gate_up_bias, down_bias)"),
    (
        "    one =",
        """
    alpha_float = Constant <value_float: float = @alpha> ()
    limit_float = Constant <value_float: float = @limit> ()
    least = Neg (limit_float)
    one_float = Constant <value_float = 1.0> ()
    one =""",
    ),
    (
        """
            both = MatMul (read, gate_up_turned)
            gate, up = Split <axis = -1, num_outputs = 2> (both)
            opening = Sigmoid (gate)
            active = Mul (gate, opening)
            inner = Mul (active, up)
""",
        """
            product = MatMul (read, gate_up_turned)
            gate_up_bias_stored = Gather <axis = 0> (gate_up_bias, e)
            gate_up_bias_float = CastLike (gate_up_bias_stored, x)
            both = Add (product, gate_up_bias_float)
            from_1 = Constant <value_ints = [1]> ()
            to_end = Constant <value_ints = [9223372036854775807]> ()
            every_2 = Constant <value_ints = [2]> ()
            gate_free = Slice (both, from_0, to_end, along_1, every_2)
            up_free = Slice (both, from_1, to_end, along_1, every_2)
            gate = Min (gate_free, limit_float)
            up = Clip (up_free, least, limit_float)
            steep = Mul (gate, alpha_float)
            opening = Sigmoid (steep)
            active = Mul (gate, opening)
            lifted = Add (up, one_float)
            inner = Mul (active, lifted)
""",
    ),
    (
        "            made = MatMul (inner, down_turned)\n",
        """
            made_free = MatMul (inner, down_turned)
            down_bias_stored = Gather <axis = 0> (down_bias, e)
            down_bias_float = CastLike (down_bias_stored, x)
            made = Add (made_free, down_bias_float)
""",
    ),
)


def _dequantize(stack: str) -> str:
    """The matrix [N, K] of expert ``e`` of a stack in MXFP4, as ``{stack}_float``."""
    return f"""
            {stack}_codes = Gather <axis = 0> ({stack}, e)
            {stack}_numbers = Cast <to = 6> ({stack}_codes)
            {stack}_values = Gather (pairs, {stack}_numbers)
            {stack}_blocks = Reshape ({stack}_values, of_blocks)
            {stack}_exponents = Gather <axis = 0> ({stack}_scales, e)
            {stack}_exponents_float = Cast <to = 1> ({stack}_exponents)
            {stack}_powers = Sub ({stack}_exponents_float, middle)
            {stack}_factors = Pow (two, {stack}_powers)
            {stack}_factor_columns = Unsqueeze ({stack}_factors, last_axis)
            {stack}_scaled = Mul ({stack}_blocks, {stack}_factor_columns)
            {stack}_float = Reshape ({stack}_scaled, of_rows)
"""


# Values of MXFP4's codes, and both of each byte.
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_PAIRS = ", ".join(f"{E2M1[byte & 15]}, {E2M1[byte >> 4]}" for byte in range(256))

# The clamped form with stacks in MXFP4: uint8 (E, 2*I, N/2) and (E, N, I/2), of two values the first in the low half,
# and scales uint8 (E, 2*I, N/32) and (E, N, I/32), exponents of two with 127 added.
_MXFP4 = _edit(
    _CLAMPED,
    ("down_bias)", "down_bias, gate_up_scales, down_scales)"),
    (
        "    alpha_float =",
        """
    pairs = Constant <value = float[256, 2] {PAIRS}> ()
    middle = Constant <value_float = 127.0> ()
    two = Constant <value_float = 2.0> ()
    of_blocks = Constant <value_ints = [0, -1, 32]> ()
    of_rows = Constant <value_ints = [0, -1]> ()
    alpha_float =""".replace("PAIRS", _PAIRS),
    ),
)
for _stack in ("gate_up", "down"):
    _read = f"""
            {_stack}_stored = Gather <axis = 0> ({_stack}, e)
            {_stack}_float = CastLike ({_stack}_stored, x)
"""
    _MXFP4 = _edit(_MXFP4, (_read, _dequantize(_stack)))


def functions() -> list[onnx.FunctionProto]:
    """The semantic operator as ONNX functions of standard operators (opset 24), in each form that it has."""
    return [onnx.parser.parse_function(text) for text in (_EXPERTS, _GELU, _CLAMPED, _MXFP4)]


@dataclass(frozen=True)
class Knobs:
    """The attributes of the operator, explained above; those of the clamped form are left out where the limit is 0, and
    the activation where it is silu."""

    chosen: int
    normalized: bool
    alpha: float
    limit: float
    activation: ExpertActivation = "silu"


def experts(
    x: Tensor,
    scores: Tensor,
    weights: Tensor,
    stacks: Sequence[Tensor],
    biases: Sequence[Tensor],
    knobs: Knobs,
    watch: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Tensor:
    """The experts that score highest, token by token -> (B, S, N).

    While torch exports, it emits one ``llmc::Experts`` node instead of computing; else ``watch`` is told an expert and
    what its products read, (R, N) and (R, I).
    """
    if torch.compiler.is_exporting():
        more: dict[str, Any] = {"alpha": knobs.alpha, "limit": knobs.limit} if knobs.limit else {}
        more |= {"activation": knobs.activation} if knobs.activation != "silu" else {}
        attributes = {"chosen": knobs.chosen, "normalized": int(knobs.normalized), **more}
        return emit_node(EXPERTS, [x, scores, weights, *stacks, *biases], attributes, x)[0]
    indices = scores.topk(knobs.chosen, -1).indices
    factors = weights.gather(-1, indices)
    factors = factors / factors.sum(-1, keepdim=True) if knobs.normalized else factors
    y = torch.zeros_like(x)
    for expert in sorted(set(indices.flatten().tolist())):
        row, token, slot = (indices == expert).nonzero(as_tuple=True)
        gate_up, down = (stack[expert].float() for stack in stacks)
        of_gate_up, of_down = (bias[expert].float() for bias in biases) if biases else (None, None)
        inner = _activate(functional.linear(x[row, token], gate_up, of_gate_up), knobs)
        if watch:
            watch(expert, x[row, token], inner)
        made = functional.linear(inner, down, of_down)
        y[row, token] += factors[row, token, slot].unsqueeze(-1) * made
    return y


def _activate(both: Tensor, knobs: Knobs) -> Tensor:
    """Gate and up (R, 2*I) -> what the last product reads (R, I)."""
    if not knobs.limit:
        gate, up = both.chunk(2, -1)
        return (functional.silu(gate) if knobs.activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
    gate, up = both[:, ::2].clamp(max=knobs.limit), both[:, 1::2].clamp(-knobs.limit, knobs.limit)
    return (up + 1) * gate * torch.sigmoid(knobs.alpha * gate)
