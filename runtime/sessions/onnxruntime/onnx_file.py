"""Places of weights as an ONNX file names them, read with protobuf, without the onnx library.

An engine maps the places into its memory and believes what it is told of them, so they are checked before.
"""

from collections.abc import Callable, Collection
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from llmc.errors import BundleError
from llmc.runtime.host.integrity import check_once
from llmc.strict import read_bytes

LOCATION = b"location"
LARGEST_GRAPH = 1 << 31  # bytes, as protobuf has it
LINE = 64  # bytes: what kernels read of a file begins on a cache line
# Bits of a value, by ``TensorProto.DataType``.
BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16}
BITS |= {17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8}
# What leads to the places, of onnx.proto.
MESSAGES = """
name: "places.proto"
message_type { name: "Model" field { name: "graph" number: 7 type_name: "Graph" type: TYPE_MESSAGE } }
message_type { name: "Graph" field { name: "initializer" number: 5 type_name: "Tensor" label: LABEL_REPEATED } }
message_type {
  name: "Tensor"
  field { name: "dims" number: 1 type: TYPE_INT64 label: LABEL_REPEATED }
  field { name: "data_type" number: 2 type: TYPE_INT32 }
  field { name: "external_data" number: 13 type_name: "Entry" label: LABEL_REPEATED }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_STRING }
}
"""


def check_weights(graph: Path, files: Collection[str]) -> None:
    """Check each place of weights that a graph names: in one of ``files`` beside the graph, within its bytes, and as
    large as the weights' shape. What passed is remembered, as :func:`check_once` does.

    Raises:
        BundleError: a place is none of these, or it is no ONNX file.
    """
    try:
        check_once("places of weights", [graph, *map(graph.parent.joinpath, files)], lambda: _check(graph, files))
    except OSError as error:
        raise BundleError(f"{graph} or its weights cannot be read ({error}); build the bundle again") from error


def _check(graph: Path, files: Collection[str]) -> None:
    from google.protobuf.message import DecodeError  # for the first load of a bundle alone

    size_of = cache(lambda name: _size(graph.parent, name, files))
    try:
        content = read_bytes(graph, LARGEST_GRAPH)
        found = 0
        for tensor in _model().FromString(content).graph.initializer:
            if tensor.external_data:
                found += tensor.SerializeToString().count(LOCATION)
                _check_tensor(tensor, size_of)
        # Constants of nodes, and graphs within graphs, may have external data as well; no build writes such.
        if content.count(LOCATION) != found:
            raise ValueError("it names weights outside of its list of weights")
    except (DecodeError, ValueError) as error:
        raise BundleError(f"{graph} is no graph of this bundle ({error}); build the bundle again") from error


@cache
def _model() -> Any:
    """The class of ``onnx.ModelProto``, with what is read of it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(MESSAGES, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


def _size(folder: Path, name: str, files: Collection[str]) -> int:
    if name not in files:
        raise ValueError(f"its weights are in {name!a:.80}, which is no file of the bundle")
    return (folder / name).stat().st_size


def _check_tensor(tensor: Any, size_of: Callable[[str], int]) -> None:
    external = {entry.key: entry.value for entry in tensor.external_data}
    if len(external) != len(tensor.external_data):
        raise ValueError("it gives weights two places")
    if other := external.keys() - {"location", "offset", "length"}:
        raise ValueError(f"it says {min(other)!a:.40} of a place, which no build writes")
    size, plain = size_of(external.get("location", "")), -(-prod(tensor.dims) * BITS.get(tensor.data_type, 0) // 8)
    _check_place(external.get("offset", "0"), external.get("length", ""), plain, size)


def _check_place(offset: str, length: str, wanted: int, size: int) -> None:
    for text in (offset, length):
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ValueError(f"{text!a:.40} is no number of bytes")
    start, count = int(offset), int(length)
    if count != wanted or start + count > size or start % LINE:
        raise ValueError(f"{count} bytes at {start} of {size} are not where weights of {wanted} bytes can be")
