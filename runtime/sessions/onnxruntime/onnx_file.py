"""Places of weights as an ONNX file names them, read without the onnx library.

A protobuf message is a row of fields: a varint key (number << 3 | wire type), and a value that starts with its length
or has a size by type (https://protobuf.dev/programming-guides/encoding). Only ``ModelProto.graph.initializer[]
.external_data[]`` is taken apart.

An engine maps the places into its memory and believes what it is told of them, so they are checked before.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cache
from math import prod
from pathlib import Path

from llmc.errors import BundleError
from llmc.runtime.host.integrity import check_once
from llmc.strict import read_bytes

MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_EXTERNAL_DATA, ENTRY_KEY, ENTRY_VALUE = 7, 5, 13, 1, 2
TENSOR_DIMS, TENSOR_TYPE = 1, 2
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
LOCATION = b"location"
LARGEST_GRAPH = 1 << 31  # bytes, as protobuf has it
LINE = 64  # bytes: what kernels read of a file begins on a cache line
# Bits of a value, by ``TensorProto.DataType``.
BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16}
BITS |= {17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8}


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
    size_of = cache(lambda name: _size(graph.parent, name, files))
    try:
        model = read_bytes(graph, LARGEST_GRAPH)
        found = 0
        for number, content, _ in _fields(model):
            for inner, tensor, _ in _fields(content) if number == MODEL_GRAPH else ():
                if inner == GRAPH_INITIALIZER and LOCATION in tensor:
                    found += tensor.count(LOCATION)
                    _check_tensor(tensor, size_of)
        # Constants of nodes, and graphs within graphs, may have external data as well; no build writes such.
        if model.count(LOCATION) != found:
            raise ValueError("it names weights outside of its list of weights")
    except (IndexError, ValueError) as error:
        raise BundleError(f"{graph} is no graph of this bundle ({error}); build the bundle again") from error


def _size(folder: Path, name: str, files: Collection[str]) -> int:
    if name not in files:
        raise ValueError(f"its weights are in {name!a:.80}, which is no file of the bundle")
    return (folder / name).stat().st_size


def _check_tensor(data: bytes, size_of: Callable[[str], int]) -> None:
    fields = [(number, value or field[1:]) for number, value, field in _fields(data)]
    dims = [size for number, value in fields if number == TENSOR_DIMS for size in _numbers(value)]
    bits = [BITS.get(_numbers(value)[0], 0) for number, value in fields if number == TENSOR_TYPE]
    entries = [_entry(value) for number, value in fields if number == TENSOR_EXTERNAL_DATA]
    external, plain = dict(entries), -(-prod(dims) * sum(bits) // 8)
    if len(external) != len(entries):
        raise ValueError("it gives weights two places")
    if other := external.keys() - {"location", "offset", "length"}:
        raise ValueError(f"it says {min(other)!a:.40} of a place, which no build writes")
    size = size_of(external.get(LOCATION.decode(), ""))
    _check_place(external.get("offset", "0"), external.get("length", ""), plain, size)


def _check_place(offset: str, length: str, wanted: int, size: int) -> None:
    for text in (offset, length):
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ValueError(f"{text!a:.40} is no number of bytes")
    start, count = int(offset), int(length)
    if count != wanted or start + count > size or start % LINE:
        raise ValueError(f"{count} bytes at {start} of {size} are not where weights of {wanted} bytes can be")


def _numbers(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _varint(data, at)
        numbers.append(number)
    return numbers


def _fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    at = 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        kind, value = key & 7, b""
        if key >> 32:  # protobuf's own reader would drop these bits, and see another field
            raise IndexError(f"field of number {key >> 3} at byte {start}")
        if kind == LENGTH_DELIMITED:
            length, at = _varint(data, at)
            value = data[at : at + length]
            at += length
        elif kind == VARINT:
            _, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise IndexError(f"field of type {kind} at byte {start}")
        if at > len(data):
            raise IndexError(f"field at byte {start} ends beyond the file")
        yield key >> 3, value, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` (7 bits per byte, lowest first, the high bit says that more follow), and where it ends."""
    value = data[at]
    if value < 0x80:  # nearly all are, and a graph has thousands
        return value, at + 1
    value = shift = 0
    while True:
        byte = data[at]
        if shift > 63:
            raise IndexError(f"number of more than 64 bits at byte {at}")
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _entry(data: bytes) -> tuple[str, str]:
    key = value = b""
    for number, text, _ in _fields(data):
        if number == ENTRY_KEY:
            key = text
        elif number == ENTRY_VALUE:
            value = text
    return key.decode(), value.decode()
