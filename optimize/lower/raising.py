"""Turn the exporter's MatMul, Transpose, Cast and Add back into whole linears, for every lowering to work on.

``llmc::Linear(x, *weights, *biases)`` with the attribute ``parts`` computes x @ concat(weights).T + concat(biases):
weights [N_i, K] stay in the checkpoint's file and type, and a packed linear has several of them.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from llmc.errors import BuildError
from llmc.exported import CodedTensor, DequantizedTensor, GgmlTensor, Weight, read_integers, sizes
from llmc.ggml import LAYOUTS
from llmc.optimize.lower.context import LoweringContext
from llmc.optimize.lower.rewrite import LLMC, Emitter, constant, nodes_of, replace

NORMS = ("RMSNormalization", "LayerNormalization")
# Nodes behind the DequantizeLinear of a weight, and what their second inputs are.
_TERMS = {"Gather": "order", "Add": "offsets", "Reshape": ""}


@dataclass(frozen=True)
class Linear:
    """A raised linear: its node, input, weights [N_i, K] and biases [N_i] (none, or one per weight)."""

    node: ir.Node
    weights: tuple[Weight, ...]
    biases: tuple[ir.ExternalTensor, ...]

    @classmethod
    def of(cls, node: ir.Node) -> "Linear":
        """Read a ``llmc::Linear`` node."""
        parts = node.attributes["parts"].as_int()
        weights, biases = node.inputs[1 : 1 + parts], node.inputs[1 + parts :]
        return cls(node, tuple(map(find_weight, weights)), tuple(map(find_vector, biases)))

    @property
    def name(self) -> str:
        assert self.node.name is not None
        return self.node.name

    @property
    def module(self) -> str:
        """The checkpoint's name of the linear, of a packed one that of its first part."""
        return self.modules[0]

    @property
    def modules(self) -> list[str]:
        """The checkpoint's names of all its parts."""
        names = [(weight.name or "").removesuffix(".weight") for weight in self.weights]
        return names if len(names) > 1 else [self.name]

    @property
    def tensor(self) -> str:
        return f"{self.name}.weight" if len(self.weights) > 1 else self.weights[0].name or ""

    @property
    def inputs(self) -> int:
        return sizes(self.weights[0])[1]

    @property
    def outputs(self) -> int:
        return sum(self.part_sizes)

    @property
    def part_sizes(self) -> list[int]:
        """Output features of each part."""
        return [sizes(weight)[0] for weight in self.weights]


def weight_value(value: ir.Value) -> ir.Value:
    """The value behind a weight input, before any Cast or Transpose: an initializer, or what integers are made to."""
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Transpose", "Identity"):
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def find_weight(value: ir.Value | None) -> Weight:
    """The checkpoint tensor behind a value, seen through Cast and Transpose; of integers with what scales them."""
    node = weight_value(value).producer() if value is not None else None
    if node is None:
        return find_vector(value)
    others: dict[str, ir.ExternalTensor] = {}
    while node is not None and node.op_type in _TERMS:
        if node.op_type != "Reshape":
            others[_TERMS[node.op_type]] = find_vector(node.inputs[1])
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is not None and node.op_type in LAYOUTS:
        return _find_blocks(node, others.get("order"))
    if node is None or node.op_type != "DequantizeLinear":
        raise _no_weight(value)
    codes, scales, *zeros = map(find_vector, node.inputs)
    return DequantizedTensor(codes, scales, zeros[0] if zeros else None, others.get("offsets"), others.get("order"))


def _find_blocks(unpack: ir.Node, columns: ir.ExternalTensor | None) -> GgmlTensor:
    """The blocks that a function of :mod:`llmc.export.ggml_ops` unpacks."""
    packed, others = unpack.inputs[0], dict[str, ir.ExternalTensor]()
    while packed is not None and (node := packed.producer()) is not None:
        packed, others["second" if node.op_type == "Concat" else "rows"] = node.inputs[0], find_vector(node.inputs[1])
    return GgmlTensor(unpack.op_type, find_vector(packed), **others, columns=columns)


def find_vector(value: ir.Value | None) -> ir.ExternalTensor:
    """The checkpoint tensor behind a value; what is no matrix is not quantized."""
    tensor = weight_value(value).const_value if value is not None else None
    if not isinstance(tensor, ir.ExternalTensor):
        raise _no_weight(value)
    return tensor


def _no_weight(value: ir.Value | None) -> BuildError:
    return BuildError(
        f"{value.name if value else 'an input'} is no weight of the checkpoint; export the checkpoint again"
    )


def norm_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type in NORMS]


def head_scales(graph: ir.Graph) -> list[ir.Value]:
    """Weights of norms that differ by head, which stand behind these norms."""
    return [value for name, value in graph.initializers.items() if name.endswith((".q_scale", ".k_scale"))]


def raise_linears(graph: ir.Graph, context: LoweringContext) -> int:
    """MatMul(x, Transpose(Cast(w))) [+ Add(., Cast(b))] -> llmc::Linear(x, w[, b]), keeping the MatMul's name.

    Integers that are kept and whose columns are sorted by groups multiply an input that is sorted as well.
    """
    count, gathered = 0, dict[tuple[ir.Value, bytes], ir.Value]()
    for matmul in nodes_of(graph, "MatMul"):
        x, weight = matmul.inputs
        assert x is not None and weight is not None
        turn = weight.producer()
        if turn is None or turn.op_type != "Transpose" or tuple(turn.attributes["perm"].as_ints()) != (1, 0):
            continue
        last, biases = matmul, []
        for add, _index in matmul.outputs[0].uses():
            if add.op_type == "Add" and add.name == f"{matmul.name}.bias":
                other = add.inputs[1] if add.inputs[0] is matmul.outputs[0] else add.inputs[0]
                assert other is not None
                last, biases = add, [weight_value(other)]
        emit = Emitter(last, matmul.name, main="Linear")
        source = weight_value(weight)
        tensor = find_weight(source)
        if isinstance(tensor, CodedTensor) and tensor.order is not None and context.keeps(matmul.name or "", tensor):
            order, node = np.argsort(read_integers(tensor.order)), source.producer()
            assert node is not None and node.inputs[0] is not None
            if (x, order.tobytes()) not in gathered:
                columns = constant(graph, f"{matmul.name}.input.order", order)
                sort = Emitter(matmul, f"{matmul.name}.input")
                gathered[x, order.tobytes()] = sort("Gather", x, columns, axis=-1)
            x, source = gathered[x, order.tobytes()], node.inputs[0]
        replace(last, emit("Linear", x, source, *biases, domain=LLMC, parts=1))
        count += 1
    return count
