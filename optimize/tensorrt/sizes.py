"""Compares an engine's bytes with those of the weights that it was built from: a library may expand integers to floats,
and then they save neither memory nor time."""

import onnx

from llmc.errors import BuildError

# Bytes of quantized weights in an engine, over those in its graph, at most: floats in place of int8 are twice as many,
# in place of int4 four times. TensorRT-RTX 1.7.1 keeps 1.0 of both, with two profiles.
MOST_EXPANDED = 1.5
# Kernels and tables, which outweigh the weights of small models: 23 MB in float16, 42 MB in int8 and int4 for the 30
# layers of SmolLM2-135M (TensorRT-RTX 1.7.1).
FIXED_BYTES = 64 << 20
KINDS = {onnx.TensorProto.INT8: "int8", onnx.TensorProto.INT4: "int4"}
MB = 10**6


def check_size(engine: int, graph: onnx.GraphProto) -> None:
    """Raise BuildError if an engine of ``engine`` bytes holds the quantized weights of its graph expanded."""
    stored = {tensor.name: (KINDS.get(tensor.data_type, ""), _bytes(tensor)) for tensor in graph.initializer}
    quantized = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"} & stored.keys()
    if not quantized:
        return
    total, held = sum(size for _, size in stored.values()), sum(stored[name][1] for name in quantized)
    if engine <= total + (MOST_EXPANDED - 1) * held + FIXED_BYTES:
        return
    kinds = "/".join(sorted({stored[name][0] for name in quantized}))
    better = "--fp16" if kinds == "int4" else "--int4 or --fp16"
    raise BuildError(
        f"the engine holds {engine / MB:.0f} MB for {total / MB:.0f} MB of weights, of which {held / MB:.0f} MB are "
        f"{kinds}: the library expanded them, so they would save neither memory nor time; use {better}"
    )


def _bytes(tensor: onnx.TensorProto) -> int:
    return next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), len(tensor.raw_data))
