"""Decoder -> ONNX without reading a weight: torch exports fake tensors, and initializers point into the checkpoint.

Names in the result, which later steps rely on (``P`` is a module path such as ``model.layers.0.self_attn.q_proj``):

* an initializer is named like its checkpoint tensor, ``P.weight``; of a quantized one those are its codes, which a
  DequantizeLinear ``P.weight.dequantizelinear`` reads with ``P.weight.scales`` and, if it has them,
  ``P.weight.zero_points``; an Add ``P.weight.add`` between two Reshapes adds ``P.weight.offsets`` [N, K / block, 1] by
  blocks, if it has them, and a Gather ``P.weight.gather`` puts columns that are sorted by groups into the order of the
  inputs, ``P.weight.order``; GGML's blocks are unpacked by a node called like the function of their type,
  ``P.weight.Q4_K``: of a Concat with ``P.weight.second`` where there are two parts, and of a Gather of the rows
  ``P.weight.rows``; a Gather puts its result's columns into the order ``P.weight.columns``; the only computed ones are
  frequencies: those of the decoder's ropes, ``rotary_emb.{i}.inv_freq`` also where there is one, and
  ``rotary_emb.{i}.long_inv_freq`` of long texts, between which a Where ``rotary_emb.{i}.where`` chooses for each row;
  and zeros for an attention that encodes no positions, or reads what ``P.q_rope`` and ``P.k_rope`` turned already,
  ``P.rotary_emb.inv_freq`` (an ONNX function cannot leave out an input, and to turn by zero is exact), and of a draft
  head ``token_rows.index`` and ``best_clusters.cluster``;
* a MatMul, RMSNormalization, LayerNormalization, CachedAttention, CausalConv, LinearAttention, Experts, Gather or
  GatherND node is named like its module, ``P``;
* a Cast or Transpose of an initializer is ``P.weight.cast``, ``P.weight.transpose``; the Add of a bias is ``P.bias``;
* any other node is ``P.<operator in lower case>``, the residual Adds of a layer ``P.residual`` and, behind a mixer,
  that of its MLP or experts ``P.residual_1``, those of positions and types of tokens ``residual`` and on;
* a node's output is ``<node>.out``, except ``hidden.0`` (embeddings), ``hidden.{i+1}`` (after layer i),
  ``per_layer.{i}`` (a layer's own input) and contract 1.
"""

import ast
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnxscript import opset18
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from llmc import __version__, bundle
from llmc.bundle import contract
from llmc.bundle.model.geometry import Geometry
from llmc.export import expert_ops, ggml_ops, ops, recurrent_ops
from llmc.export.blocks.rope import inverse_frequencies
from llmc.export.config import DecoderConfig
from llmc.export.decoder import Decoder
from llmc.export.encoder import Encoder
from llmc.export.sources.safetensors import StoredTensor
from llmc.exported import BLOCK_PARTS
from llmc.ggml import LAYOUTS

# The first ONNX IR version that knows opset 24.
IR_VERSION = 12
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IR_TYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I32": ir.DataType.INT32,
    "I8": ir.DataType.INT8,
    "U8": ir.DataType.UINT8,
    "I4": ir.DataType.INT4,
    **dict.fromkeys(LAYOUTS, ir.DataType.UINT8),
}
_SCOPES = "pkg.torch.onnx.name_scopes"
_NORMS = ("RMSNormalization", "LayerNormalization")
_ATTENTIONS = (ops.CACHED_ATTENTION, ops.SHARED_ATTENTION, ops.SELF_ATTENTION)
_RECURRENT = (recurrent_ops.CAUSAL_CONV, recurrent_ops.LINEAR_ATTENTION)
_NAMED_LIKE_MODULE = {"MatMul", *_NORMS, *_ATTENTIONS, *_RECURRENT, ops.ROTATED_HEADS, expert_ops.EXPERTS}
_NAMED_LIKE_MODULE |= {"Gather", "GatherND"}
# Attributes that only some forms of a function have.
_FORMS = ops.FORMS | {"activation"}
# Sizes to trace with: at least 2 (torch specialises 0 and 1), and all different, so that none is confused with another.
_SIZES = {"batch": 2, "sequence": 5, "outputs": 3, "capacity": 7, "rows": 11}


def build_graph(config: DecoderConfig, tensors: Mapping[str, StoredTensor], base: Path) -> ir.Model:
    """Export the decoder and refer to its weights in the files of ``base``."""
    geometry = config.geometry
    samples, shapes, names = _sample_inputs(geometry)
    model = trace(lambda: _module(geometry)(config), tensors, samples, shapes)
    graph = model.graph
    inputs = [graph.outputs.pop() for _ in range(geometry.layers * bool(geometry.per_layer))][::-1]
    borders = [graph.outputs.pop() for _ in range(geometry.layers + 1)][::-1]
    _name_contract(graph, geometry, names)  # first: the next step finds by the dimensions' names what a Reshape keeps
    for name, frequencies in _frequencies(config).items():
        graph.initializers[name].const_value = ir.tensor(frequencies, name=name)
    of_tokens = (
        {"token_rows.index": config.head.tokens, "best_clusters.cluster": config.head.clusters} if config.head else {}
    )
    for name, numbers in of_tokens.items():
        if numbers:
            graph.initializers[name].const_value = ir.tensor(np.array(numbers), name=name)
    finish_graph(model, tensors, base)
    for i, hidden in enumerate(borders):  # so that the graph can be cut between layers
        hidden.name = f"hidden.{i}"
    for i, own in enumerate(inputs):
        own.name = f"per_layer.{i}"
    return model


def finish_graph(model: ir.Model, tensors: Mapping[str, StoredTensor], base: Path, name: str = "decoder") -> None:
    """Tidy what :func:`trace` gave, whose inputs and outputs have names, and refer to the weights in ``base``."""
    graph = model.graph
    _fold_reshapes(graph)
    common_passes.IdentityEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)  # removes nodes that computed the shapes of folded Reshapes
    _name_nodes(graph)
    _dequantize(graph, tensors)
    _unpack_blocks(graph, tensors)
    _read_mxfp4(graph, tensors)
    _point_to_weights(graph, tensors, base)
    _clear_metadata(model)
    _sign(model, name)


def check_graph(model: ir.Model, geometry: Geometry) -> None:
    """Check the graph as ONNX, and that the inventory lists its nodes."""
    listed = {
        ("MatMul",): [linear.name for linear in geometry.linears],
        _NORMS: [norm.name for norm in geometry.norms],
        _ATTENTIONS: [attention.name for attention in geometry.attentions],
        (recurrent_ops.CAUSAL_CONV,): [f"{item.name}.conv" for item in geometry.recurrents],
        (expert_ops.EXPERTS,): [item.name for item in geometry.mixtures],
        (recurrent_ops.LINEAR_ATTENTION,): [item.name for item in geometry.recurrents if item.rule != "conv"],
    }
    check_nodes(model, listed)
    check_onnx(model)


def check_nodes(model: ir.Model, listed: Mapping[tuple[str, ...], list[str]]) -> None:
    """Check that the nodes of some operators have these names, in this order."""
    for operators, names in listed.items():
        nodes = [node.name for node in model.graph if node.op_type in operators]
        assert nodes == names, (
            f"the inventory lists {len(names)} of {len(nodes)} {operators[0]} nodes, or in another order"
        )


def check_onnx(model: ir.Model) -> None:
    """Check structure, types and shapes. Weights are checked as inputs, since onnx refuses external data in a
    hard-linked file."""
    proto = ir.to_proto(model)
    tensors = list(proto.graph.initializer)
    del proto.graph.initializer[:]
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            proto.graph.initializer.append(tensor)
    onnx.checker.check_model(proto, full_check=True)


def trace(
    make: Callable[[], nn.Module],
    tensors: Mapping[str, StoredTensor],
    arguments: tuple[Any, ...],
    shapes: tuple[Any, ...],
    *,
    decompose: bool = False,
) -> ir.Model:
    """A module, whose parameters have the types of ``tensors``, as torch exports it, with whatever names.

    ``decompose``: let torch trace the graph a second time. This takes two thirds of an export and changes nothing where
    every operator has an ONNX form and every size of a view is that of an axis, or a number.
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        module = make().eval()
        parameters = dict(module.named_parameters())
        fakes = {
            name: torch.empty(parameters[name].shape, dtype=_TORCH_DTYPES.get(stored.dtype, torch.float32))
            for name, stored in tensors.items()
            if name in parameters
        }
        module.load_state_dict(fakes, assign=True)
        exported = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
        if not decompose:
            setattr(exported, "run_decompositions", lambda _table: exported)  # noqa: B010
        program = torch.onnx.export(
            exported,
            opset_version=ops.OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table={torch.ops.aten.to.dtype: _cast},
        )
    assert program is not None
    return program.model


def _cast(value: Any, dtype: int) -> Any:
    """The ONNX form of ``Tensor.to(dtype)``."""
    return opset18.Cast(value, to=dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about missing torchvision and its own deprecated internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _sample_inputs(geometry: Geometry) -> tuple[tuple[Any, ...], tuple[Any, ...], list[str]]:
    """Arguments of the module's ``forward``, the dimensions of each that are a call's, and the inputs in this order."""
    inputs, free = contract.list_inputs(geometry), {name: torch.export.Dim(name) for name in _SIZES}
    layers = [geometry.caches_of(layer) for layer in range(geometry.layers)]
    held = [[cache] for cache in geometry.caches] if geometry.borrows else layers

    def arrange(made: Mapping[str, Any]) -> tuple[Any, ...]:
        pasts = [tuple(made[name] for cache in caches for name in cache.inputs) for caches in held]
        return tuple({**made, "pasts": pasts}.get(name) for name in signature(_module(geometry).forward).parameters)

    def sample(kind: str, shape: Sequence[Any]) -> torch.Tensor:
        return torch.zeros([_SIZES.get(axis, axis) for axis in shape], dtype=getattr(torch, kind))

    samples = {name: sample(*tensor) for name, tensor in inputs.items()}
    shapes = {name: {i: free[it] for i, it in enumerate(shape) if it in free} for name, (_, shape) in inputs.items()}
    names = [name for name in tree_leaves(arrange({name: name for name in inputs})) if name is not None]
    return arrange(samples)[1:], arrange(shapes)[1:], names


def _module(geometry: Geometry) -> type[Decoder | Encoder]:
    return Encoder if geometry.encoder else Decoder


def _name_contract(graph: ir.Graph, geometry: Geometry, names: Sequence[str]) -> None:
    """Give inputs, called ``names`` in their order, outputs and symbolic dimensions the names of contract 1."""
    inputs, dims = contract.list_inputs(geometry), dict[str, str]()
    for value, name in zip(graph.inputs, names, strict=True):
        pairs = zip(value.shape or (), inputs[name][1], strict=True)
        value.name, dims = name, dims | {str(dim): axis for dim, axis in pairs if isinstance(axis, str)}
    name_dimensions(graph, dims)
    for value, name in zip(graph.outputs, contract.list_outputs(geometry), strict=True):
        value.name = name


def name_dimensions(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Give symbolic dimensions other names, those that are not in ``names`` none."""
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([dim if isinstance(dim, int) else names.get(str(dim)) for dim in value.shape])


def _fold_reshapes(graph: ir.Graph) -> None:
    """Say ``0`` (keep) for batch and sequence in a Reshape, and ``-1`` for what is merged with one, instead of
    computing them from the inputs' shapes."""
    for node in graph:
        if node.op_type != "Reshape" or node.outputs[0].shape is None:  # without a shape: part of computing one
            continue
        before, after = node.inputs[0], node.outputs[0]
        assert after.shape is not None
        assert before is not None and before.shape is not None
        kept = [not isinstance(b, int) and a == b for a, b in zip(before.shape, after.shape, strict=False)]
        dims = [
            0 if i < len(kept) and kept[i] else dim if isinstance(dim, int) else -1 for i, dim in enumerate(after.shape)
        ]
        node.replace_input_with(1, _shape_initializer(graph, dims))
        node.attributes.pop("allowzero", None)


def _shape_initializer(graph: ir.Graph, dims: Sequence[int]) -> ir.Value:
    assert dims.count(-1) < 2, f"a Reshape to {dims} does more than split and merge dimensions"
    name = "shape." + "x".join(map(str, dims))
    if name not in graph.initializers:
        graph.register_initializer(ir.val(name, const_value=ir.tensor(np.array(dims, np.int64), name=name)))
    return graph.initializers[name]


def _frequencies(config: DecoderConfig) -> dict[str, npt.NDArray[np.float32]]:
    used = {attention.rope for attention in config.geometry.attentions}
    ropes = {f"rotary_emb.{i}": rope for i, rope in enumerate(config.ropes) if i in used}
    switching = {f"{name}.long_inv_freq": rope for name, rope in ropes.items() if rope.long_factors}
    return {
        **{f"{name}.inv_freq": inverse_frequencies(rope) for name, rope in ropes.items()},
        **{name: inverse_frequencies(rope, long=True) for name, rope in switching.items()},
    } | {
        f"{attention.name}.rotary_emb.inv_freq": np.zeros(attention.head_dim // 2, np.float32)
        for attention in config.geometry.attentions
        if attention.rope is None or attention.turned_before
    }


def _dequantize(graph: ir.Graph, tensors: Mapping[str, StoredTensor]) -> None:
    """Make float weights [N, K] of codes, scales and zero points, in front of all nodes."""
    for name, stored in tensors.items():
        if f"{name}.scales" not in tensors or stored.dtype == "U8":
            continue
        codes = graph.initializers[name]
        block = stored.shape[1] // tensors[f"{name}.scales"].shape[1]
        parts = [_declare_initializer(graph, f"{name}.{part}", tensors) for part in ("scales", "zero_points")]
        node = ir.node("DequantizeLinear", [codes, *filter(None, parts)], {"axis": 1, "block_size": block})
        made = [node]
        if (offsets := _declare_initializer(graph, f"{name}.offsets", tensors)) is not None:
            blocks, rows = (_shape_initializer(graph, shape) for shape in ([0, -1, block], [0, stored.shape[1]]))
            made.append(ir.node("Reshape", [made[-1].outputs[0], blocks]))
            made.append(ir.node("Add", [made[-1].outputs[0], offsets]))
            made.append(ir.node("Reshape", [made[-1].outputs[0], rows]))
        if (order := _declare_initializer(graph, f"{name}.order", tensors)) is not None:
            made.append(ir.node("Gather", [made[-1].outputs[0], order], {"axis": 1}))
        _put_before(graph, codes, stored, made)


def _unpack_blocks(graph: ir.Graph, tensors: Mapping[str, StoredTensor]) -> None:
    """Make float weights [N, K] of GGML's blocks, in front of all nodes."""
    for name in [name for name in graph.initializers if name in tensors and tensors[name].dtype in LAYOUTS]:
        packed, kind = graph.initializers[name], tensors[name].dtype
        second, rows, columns = (_declare_initializer(graph, f"{name}.{part}", tensors) for part in BLOCK_PARTS)
        last, made = packed, list[ir.Node]()
        for op_type, other, axis in (
            ("Concat", second, 0),
            ("Gather", rows, 0),
            (kind, None, 0),
            ("Gather", columns, 1),
        ):
            if op_type == kind:
                made.append(ir.node(kind, [last], domain=ops.DOMAIN))
            elif other is not None:
                made.append(ir.node(op_type, [last, other], {"axis": axis}))
                if axis == 0:
                    made[-1].outputs[0].type = ir.TensorType(ir.DataType.UINT8)
            last = made[-1].outputs[0] if made else packed
        _put_before(graph, packed, tensors[name], made)


def _put_before(graph: ir.Graph, codes: ir.Value, stored: StoredTensor, made: list[ir.Node]) -> None:
    """Let a chain of nodes, whose first one reads ``codes``, make the float weights that ``codes`` stood for."""
    name, shape = codes.name, codes.shape
    if shape is not None and len(shape) > 2:  # of all experts, one below the other
        made.append(ir.node("Reshape", [made[-1].outputs[0], _shape_initializer(graph, shape.numpy())]))
    for number, step in enumerate(made):
        before = sum(step.op_type == other.op_type for other in made[:number])
        kind = step.op_type if step.domain else step.op_type.lower()
        step.name = f"{name}.{kind}{f'_{before}' if before else ''}"
        step.outputs[0].name = f"{step.name}.out"
        step.outputs[0].type = step.outputs[0].type or ir.TensorType(ir.DataType.FLOAT)
    made[-1].outputs[0].shape = shape
    codes.replace_all_uses_with(made[-1].outputs[0])
    made[0].replace_input_with(0, codes)
    codes.type, codes.shape = ir.TensorType(_IR_TYPES[stored.dtype]), ir.Shape(stored.shape)
    graph.insert_before(graph[0], made)


def _read_mxfp4(graph: ir.Graph, tensors: Mapping[str, StoredTensor]) -> None:
    """Let experts whose stacks are in MXFP4 read these as they are, and behind all else their scales."""
    for node in graph:
        stacks = [value.name or "" for value in node.inputs[3:5] if value is not None]
        names = [name for name in stacks if f"{name}.scales" in tensors]
        if node.op_type != expert_ops.EXPERTS or not names:
            continue
        node.resize_inputs(len(node.inputs) + len(names))
        for place, name in enumerate(names, len(node.inputs) - len(names)):
            graph.initializers[name].type = ir.TensorType(ir.DataType.UINT8)
            graph.initializers[name].shape = ir.Shape(tensors[name].shape)
            node.replace_input_with(place, _declare_initializer(graph, f"{name}.scales", tensors))


def _declare_initializer(graph: ir.Graph, name: str, tensors: Mapping[str, StoredTensor]) -> ir.Value | None:
    if name not in tensors:
        return None
    stored = tensors[name]
    value = ir.val(name, shape=ir.Shape(stored.shape), type=ir.TensorType(_IR_TYPES[stored.dtype]))
    value.const_value = ir.tensor(np.zeros(0), name=name)  # its offset is filled in with those of all others
    graph.register_initializer(value)
    return value


def _point_to_weights(graph: ir.Graph, tensors: Mapping[str, StoredTensor], base: Path) -> None:
    for name, stored in tensors.items():
        graph.initializers[name].const_value = ir.ExternalTensor(
            stored.file,
            stored.offset,
            stored.length,
            _IR_TYPES[stored.dtype],
            shape=ir.Shape(stored.shape),
            name=name,
            base_dir=base,
        )


def _name_nodes(graph: ir.Graph) -> None:
    taken: set[str] = set()
    for node in graph:
        name = base = _node_name(node)
        number = 0
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        node.name = name
        for value in node.outputs:
            if not value.is_graph_output() and value.uses():
                value.name = f"{name}.out"


def _node_name(node: ir.Node) -> str:
    weights = [_weight_behind(value) for value in node.inputs]
    operator = node.op_type.lower()
    if node.op_type in ("Cast", "Transpose") and weights[0]:
        return f"{weights[0]}.{operator}"
    scope: str = ast.literal_eval(node.metadata_props[_SCOPES])[-2]
    if node.op_type in _NAMED_LIKE_MODULE:
        return scope
    if node.op_type == "Add":
        return weights[1] or f"{scope}.residual".lstrip(".")
    return f"{scope}.{operator}"


def _weight_behind(value: ir.Value | None) -> str | None:
    while value is not None and not value.is_initializer():
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in ("Cast", "Transpose") else None
    return None if value is None else value.name


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _clear_metadata(model: ir.Model) -> None:
    """Drop the exporter's metadata (stack traces, class names), most of the file's size."""
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in [*_values(model.graph), *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


def _sign(model: ir.Model, name: str) -> None:
    # Some have a form with more inputs, with another activation, or for images.
    for kind in {node.op_type for node in model.graph} & LAYOUTS.keys():
        function = ir.serde.deserialize_function(ggml_ops.function(kind))
        model.functions[function.identifier()] = function
        model.opset_imports[ops.DOMAIN] = ops.DOMAIN_VERSION
    used = {(node.op_type, len(node.inputs), _FORMS & {*node.attributes}) for node in model.graph}
    for text in (*ops.functions(), *recurrent_ops.functions(), *expert_ops.functions()):
        function = ir.serde.deserialize_function(text)
        if (function.name, len(function.inputs), _FORMS & {*function.attributes}) in used:
            model.functions[function.identifier()] = function
    model.graph.name = name
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "llmc", __version__
    model.metadata_props["llmc.graph_contract"] = str(bundle.GRAPH_CONTRACT_VERSION)
    model.metadata_props["llmc_version"] = __version__
    model.metadata_props["producer"] = "llmc export"
