"""The semantic operator of mixtures of experts: its computation in torch and its equivalent ONNX function."""

import onnx
import onnx.parser
import torch
from torch import Tensor
from torch.nn import functional

from llmc.export.ops import DOMAIN, DOMAIN_VERSION

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


def functions() -> list[onnx.FunctionProto]:
    """The semantic operator as an ONNX function of standard operators (opset 24)."""
    return [onnx.parser.parse_function(_EXPERTS)]


def experts(
    x: Tensor, scores: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, chosen: int, normalized: bool
) -> Tensor:
    """The experts that score highest, token by token -> (B, S, N).

    While torch exports, it emits one ``llmc::Experts`` node instead of computing.
    """
    if torch.compiler.is_exporting():
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{EXPERTS}",
            [x, scores, weights, gate_up, down],
            {"chosen": chosen, "normalized": int(normalized)},
            dtype=x.dtype,
            shape=x.shape,
            version=DOMAIN_VERSION,
        )
    indices = scores.topk(chosen, -1).indices
    factors = weights.gather(-1, indices)
    factors = factors / factors.sum(-1, keepdim=True) if normalized else factors
    y = torch.zeros_like(x)
    for expert in sorted(set(indices.flatten().tolist())):
        row, token, slot = (indices == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[row, token], gate_up[expert].float()).chunk(2, -1)
        made = functional.linear(functional.silu(gate) * up, down[expert].float())
        y[row, token] += factors[row, token, slot].unsqueeze(-1) * made
    return y
