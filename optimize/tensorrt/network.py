"""From a lowered ONNX file to a network of the library, with nothing lost on the way.

The file holds no weights, only where they lie: they are mapped into memory and given to the parser by address, so no
protobuf message comes near 2 GB and no weight is copied.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from llmc.errors import BuildError
from llmc.optimize.tensorrt.messages import list_dropped
from llmc.runtime.sessions.tensorrt.library import logger

CAPACITY = "capacity"
NAMED_AT_MOST = 4
QUERY, KEY = 0, 1  # inputs of an attention

# Least, best and largest size of each named dimension in one optimisation profile.
Ranges = Mapping[str, tuple[int, int, int]]


def read_graph(path: Path, capacity: int) -> onnx.ModelProto:
    """The file without its weights; its dimension ``capacity`` is made static, as cache updates ask."""
    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise BuildError(f"{path} is missing or corrupt ({error}); lower the graph again") from error
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == CAPACITY:
                dim.dim_value = capacity
    return model


class Network:
    """A parsed graph. Keeps the mapped weights alive, which the library reads while it builds."""

    def __init__(self, library: Any, builder: Any, path: Path, model: onnx.ModelProto) -> None:
        self.library = library
        self.graph = model.graph
        self._weights: dict[str, Any] = {}
        self.native = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._parser = library.OnnxParser(self.native, logger(library).native)
        self._parse(path, model)

    def _parse(self, path: Path, model: onnx.ModelProto) -> None:
        with logger(self.library).collect_messages() as messages:
            self.messages = messages
            parsed = self._load(path, model)
        if not parsed:
            raise BuildError(f"{path.name} is refused by the parser: {'; '.join(self._errors())}")
        refused = [*list_dropped(messages), *self._list_left_out()]
        if refused:
            raise BuildError(
                f"{path.name}: the parser left out part of the graph, so that results would be wrong: "
                f"{'; '.join(refused[:NAMED_AT_MOST])}"
            )

    def _load(self, path: Path, model: onnx.ModelProto) -> bool:
        if not self._parser.load_model_proto(model.SerializeToString()):
            return False
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                address, size = self._map_weights(path.parent, tensor)
                if not self._parser.load_initializer(tensor.name, address, size):
                    raise BuildError(f"{path.name}: the parser refuses the weights {tensor.name} of {size} bytes")
        return bool(self._parser.parse_model_proto())

    def _map_weights(self, folder: Path, tensor: onnx.TensorProto) -> tuple[int, int]:
        where = {entry.key: entry.value for entry in tensor.external_data}
        name = where["location"]
        if name not in self._weights:
            try:
                self._weights[name] = np.memmap(folder / name, np.uint8, "r")
            except (OSError, ValueError) as error:
                raise BuildError(f"{folder / name} cannot be mapped ({error}), yet holds {tensor.name}") from error
        offset, size = int(where.get("offset", 0)), int(where.get("length", 0))
        if offset + size > self._weights[name].size:
            raise BuildError(f"{folder / name} ends inside {tensor.name}; the file is truncated, lower the graph again")
        return self._weights[name].ctypes.data + offset, size

    def _errors(self) -> list[str]:
        errors = (self._parser.get_error(i) for i in range(min(self._parser.num_errors, NAMED_AT_MOST)))
        texts = [f"{error.node_name() or 'node'} ({error.node_operator() or '?'}): {error.desc()}" for error in errors]
        return texts or ["it gave no reason"]

    def layers(self) -> Iterator[Any]:
        return (self.native.get_layer(i) for i in range(self.native.num_layers))

    def inputs(self) -> list[Any]:
        return [self.native.get_input(i) for i in range(self.native.num_inputs)]

    def outputs(self) -> list[Any]:
        return [self.native.get_output(i) for i in range(self.native.num_outputs)]

    def _list_left_out(self) -> list[str]:
        """Values of the graph that no layer reads though a node of the graph does.

        The parser drops inputs that it does not know, and warns only where they are inputs of the whole graph. What
        computed them is then left without a reader.
        """
        read = {tensor.name for layer in self.layers() for tensor in _inputs(layer)}
        read |= {output.name for output in self.outputs()}
        made = {tensor.name for layer in self.layers() for tensor in _outputs(layer)}
        made |= {tensor.name for tensor in self.inputs()}
        readers = {name: node for node in self.graph.node for name in node.input if name}
        lost = [name for name in readers if name in made and name not in read]
        return [f"{readers[name].op_type} {readers[name].name} does not get {name}" for name in lost]

    # ------------------------------------------------------------------------------------------------- attention

    def refine(self) -> list[Any]:
        """Remove the parser's scales of 1 from every attention; the attentions.

        The parser multiplies query and keys by the root of the scale, even of 1: a pass over all keys at every step.
        """
        layers = list(self.layers())
        makers = {tensor.name: layer for layer in layers for tensor in _outputs(layer)}
        plain = [node for node in self.graph.node if node.op_type == "Attention" and _scale(node) == 1.0]
        unscaled = {node.input[index] for node in plain for index in (QUERY, KEY)}
        attentions = [layer for layer in layers if layer.type.name == "ATTENTION_INPUT"]
        for layer in attentions:
            layer.__class__ = self.library.IAttentionInputLayer  # the documented way to downcast
            for index in (QUERY, KEY):
                maker = makers.get(layer.get_input(index).name)
                if maker is not None and maker.type.name == "ELEMENTWISE" and maker.get_input(0).name in unscaled:
                    layer.attention.set_input(index, maker.get_input(0))
        return [layer.attention for layer in attentions]

    def aliases(self) -> dict[str, str]:
        """Outputs that are an input updated in place, as output -> input."""
        updates = [layer for layer in self.layers() if layer.type.name == "KV_CACHE_UPDATE"]
        return {layer.get_output(0).name: layer.get_input(0).name for layer in updates}


def _inputs(layer: Any) -> Iterator[Any]:
    return (tensor for tensor in map(layer.get_input, range(layer.num_inputs)) if tensor is not None)


def _outputs(layer: Any) -> Iterator[Any]:
    return (tensor for tensor in map(layer.get_output, range(layer.num_outputs)) if tensor is not None)


def _scale(node: onnx.NodeProto) -> float | None:
    """The scale that a node says; None where it leaves it to the operator."""
    return next((attribute.f for attribute in node.attribute if attribute.name == "scale"), None)


def profile_shapes(graph: onnx.GraphProto, ranges: Ranges) -> dict[str, list[tuple[int, ...]]]:
    """Least, best and largest shape of each input that has named dimensions."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for value in graph.input:
        dims = list(value.type.tensor_type.shape.dim)
        unknown = [dim.dim_param for dim in dims if not dim.HasField("dim_value") and dim.dim_param not in ranges]
        if unknown:
            raise BuildError(
                f"input {value.name} has the dimension {unknown[0] or '?'!r}; expected one of {', '.join(ranges)}"
            )
        sizes = [ranges[dim.dim_param] if not dim.HasField("dim_value") else (dim.dim_value,) * 3 for dim in dims]
        if any(not dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = [tuple(size[kind] for size in sizes) for kind in range(3)]
    return shapes
