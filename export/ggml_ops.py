"""ONNX functions that unpack GGML's block types, written in standard operators from the tables of :mod:`llmc.ggml`.

``llmc::Q4_K(packed)`` and so on: rows of blocks uint8 [N, bytes] -> weights float32 [N, K], to the last bit as
:meth:`llmc.ggml.Layout.unpack` has them.
"""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from llmc.export.ops import DOMAIN, OPSET
from llmc.ggml import LAYOUTS, Layout, Numbers


def function(kind: str) -> onnx.FunctionProto:
    """The function of one of :data:`llmc.ggml.LAYOUTS`."""
    body, layout = _Body(), LAYOUTS[kind]
    blocks = body("Reshape", "packed", body.constant([0, -1, layout.size]))
    weights = _unpack(body, layout, blocks)
    body.nodes.append(helper.make_node("Reshape", [weights, body.constant([0, -1])], ["weights"]))
    imports = [helper.make_opsetid("", OPSET)]
    return helper.make_function(DOMAIN, kind, ["packed"], ["weights"], body.nodes, imports)


class _Body:
    """The nodes of a function: a call adds one and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def constant(self, values: Any) -> str:
        return self("Constant", value=numpy_helper.from_array(np.asarray(values)))


def _unpack(body: _Body, layout: Layout, blocks: str) -> str:
    """Blocks uint8 [N, B, bytes] -> weights float32 [N, B, scales, weights that share one]."""
    last = body.constant([-1])
    scales = _read(body, layout.scales, blocks)
    codes = body("Reshape", _read(body, layout.codes, blocks), body.constant([0, 0, -1, layout.block]))
    weights = body("Mul", codes, body("Unsqueeze", scales, last))
    if layout.minima is None:
        return weights
    middles = body("Mul", scales, body.constant(np.float32(layout.middle)))
    offsets = body("Add", _read(body, layout.minima, blocks), middles)
    return body("Add", weights, body("Unsqueeze", offsets, last))


def _read(body: _Body, numbers: Numbers, blocks: str) -> str:
    """Blocks uint8 [N, B, bytes] -> their numbers, float32 [N, B, n]."""
    fields = []
    for bits in numbers.bits:
        field = _gather(body, blocks, bits.at)
        field = body("BitwiseAnd", _shift(body, field, bits.shift, "RIGHT"), body.constant(bits.mask))
        fields.append(_shift(body, field, np.array([bits.up], np.uint8), "LEFT"))
    factor = None if numbers.half is None else _read_half(body, blocks, numbers.half)
    if not fields:
        assert factor is not None
        return factor if numbers.values[0] == 1 else body("Neg", factor)
    index = fields[0] if len(fields) == 1 else body("BitwiseOr", *fields)
    if numbers.rows is not None:
        index = body("Add", body("Cast", index, to=TensorProto.INT32), body.constant(numbers.rows))
    values = _look_up(body, numbers.values.astype(np.float32), index)
    return values if factor is None else body("Mul", factor, values)


def _read_half(body: _Body, blocks: str, at: int) -> str:
    """The float16 at a byte of each block, float32 [N, B, 1]: 10 bits of a fraction, 5 of an exponent and a sign."""
    low, high = (_gather(body, blocks, np.array([place])) for place in (at, at + 1))
    upper = body("Cast", body("BitwiseAnd", high, body.constant(np.uint8(3))), to=TensorProto.FLOAT)
    above = body("Mul", upper, body.constant(np.float32(256)))
    fraction = body("Add", body("Cast", low, to=TensorProto.FLOAT), above)
    rest = _shift(body, high, np.array([2], np.uint8), "RIGHT")
    exponents = np.tile(np.arange(32), 2)
    powers = np.ldexp(np.float32(1), np.maximum(exponents, 1) - 25) * np.repeat(np.array([1, -1], np.float32), 32)
    whole = body("Add", fraction, _look_up(body, np.float32(1024) * (exponents > 0), rest))
    return body("Mul", whole, _look_up(body, np.where(exponents == 31, np.inf, powers).astype(np.float32), rest))


def _gather(body: _Body, blocks: str, at: NDArray[np.int64]) -> str:
    return body("Gather", blocks, body.constant(at), axis=2)


def _shift(body: _Body, value: str, by: NDArray[np.uint8], direction: str) -> str:
    return body("BitShift", value, body.constant(by), direction=direction) if by.any() else value


def _look_up(body: _Body, values: NDArray[np.float32], index: str) -> str:
    return body("Gather", body.constant(values), body("Cast", index, to=TensorProto.INT32))
