"""The few verbs that passes rewrite a graph with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from llmc.bundle import DECODER_FILE
from llmc.errors import BundleError

MICROSOFT = "com.microsoft"
LLMC = "llmc"


def read_graph(export: Path, name: str = DECODER_FILE) -> ir.Model:
    """The portable decoder of an export, or another of its graphs."""
    path = export / name
    try:
        model = ir.load(path)
    except (OSError, DecodeError) as error:
        raise BundleError(f"{path} is missing or corrupt ({error}); export the checkpoint again") from error
    if not len(model.graph):
        raise BundleError(f"{path} is corrupt (it holds no graph); export the checkpoint again")
    return model


def write_part(part: ir.Graph, model: ir.Model, path: Path) -> None:
    """Write a part of a model's graph as a model of the same operators."""
    made = ir.Model(part, ir_version=model.ir_version)
    made.graph.opset_imports.update(model.graph.opset_imports)
    ir.save(made, path)


class Emitter:
    """Puts new nodes in front of an anchor node and hands out their outputs.

    A node whose operator is ``main`` takes the name ``name`` as it is, any other is called ``name.operator``.
    """

    def __init__(self, anchor: ir.Node, name: str | None = None, main: str = "") -> None:
        assert anchor.graph is not None and anchor.name is not None
        self.graph: ir.Graph = anchor.graph
        self.anchor = anchor
        self.name = name or anchor.name
        self.main = main

    def many(
        self, op: str, inputs: list[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs)
        node.name = unique(self.graph, self.name if op == self.main else f"{self.name}.{op}")
        for i, value in enumerate(node.outputs):
            value.name = f"{node.name}.{i}"
        self.anchor.prepend(node)
        return list(node.outputs)

    def __call__(self, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Insert a node with one output."""
        return self.many(op, list(inputs), 1, domain, **attributes)[0]


def emit_conversion(emit: Emitter, value: ir.Value, before: ir.DataType, after: ir.DataType) -> ir.Value:
    """``value`` as the type ``after``; it is ``before`` now."""
    return value if before == after else emit("Cast", value, to=after)


def unique(graph: ir.Graph, name: str) -> str:
    """``name``, numbered if a node of the graph was given it before."""
    taken: dict[str, int] = graph.meta.setdefault("names", {})
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """The initializer called ``name``, made from ``array`` when it is not there yet; a name stands for one content."""
    value = initializer(graph, ir.tensor(array, name=name))
    assert value.const_value is not None
    assert np.array_equal(value.const_value.numpy(), array), f"{name} is a constant already, with other values"
    return value


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    assert tensor.name is not None
    if tensor.name not in graph.initializers:
        graph.register_initializer(ir.val(tensor.name, const_value=tensor))
    return graph.initializers[tensor.name]


def scalar(graph: ir.Graph, value: float | int, dtype: type[np.generic] | np.dtype[np.generic]) -> ir.Value:
    """A shared constant of shape []."""
    return constant(graph, f"const.{np.dtype(dtype).name}.{value}", np.array(value, dtype))


def vector(graph: ir.Graph, values: list[int], dtype: type[np.generic] = np.int64) -> ir.Value:
    """A shared constant of shape [len(values)]."""
    return constant(graph, f"const.{np.dtype(dtype).name}s.{'_'.join(map(str, values))}", np.array(values, dtype))


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def nodes_of(graph: ir.Graph, op_type: str, domain: str = "") -> Iterator[ir.Node]:
    """Nodes of one operator, in order, safe against changes while iterating."""
    return iter([node for node in graph if node.op_type == op_type and node.domain == domain])


def node_after(value: ir.Value) -> ir.Node:
    """The node that follows the one that computes ``value``."""
    made = value.producer()
    assert made is not None and made.graph is not None
    nodes = iter(made.graph)
    next(node for node in nodes if node is made)
    return next(nodes)


def replace(node: ir.Node, *outputs: ir.Value) -> None:
    """Let ``outputs`` take the place of the node's outputs, names included, and remove the node."""
    graph = node.graph
    assert graph is not None
    for old, new in zip(node.outputs, outputs, strict=True):
        new.name, old.name = old.name, None
        if old.is_graph_output():
            new.shape, new.type = old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The only node that reads ``value``, if there is exactly one reader and it is a node."""
    users = [node for node, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def remove_dead(graph: ir.Graph) -> int:
    """Remove nodes that nothing reads and initializers left without a reader; return how many nodes went."""
    removed = 0
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
            removed += 1
    for name in [
        name for name, value in graph.initializers.items() if not value.uses() and not value.is_graph_output()
    ]:
        del graph.initializers[name]
    return removed
