"""Places of weights as an ONNX file names them, read and changed without the onnx library.

A protobuf message is a row of fields: a varint key (number << 3 | wire type), and a value that starts with its length
or has a size by type (https://protobuf.dev/programming-guides/encoding). Only ``ModelProto.graph.initializer[]
.external_data[]`` is taken apart; everything else is copied as it is.
"""

from collections.abc import Callable, Iterator

from llmc.errors import BundleError

MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_EXTERNAL_DATA, ENTRY_KEY, ENTRY_VALUE = 7, 5, 13, 1, 2
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

ExternalData = dict[str, str]


def relocated(model: bytes, change: Callable[[ExternalData], ExternalData]) -> bytes:
    """The file with ``change`` applied to the external data of each initializer that has any.

    Raises:
        BundleError: it is no ONNX file.
    """

    def tensor(data: bytes) -> bytes:
        entries = dict(_entry(value) for number, value, _ in _fields(data) if number == TENSOR_EXTERNAL_DATA)
        if not entries:
            return data
        rest = [field for number, _, field in _fields(data) if number != TENSOR_EXTERNAL_DATA]
        changed = [_wrapped(TENSOR_EXTERNAL_DATA, _written(*entry)) for entry in change(entries).items()]
        return b"".join(rest + changed)

    try:
        return _mapped(model, MODEL_GRAPH, lambda graph: _mapped(graph, GRAPH_INITIALIZER, tensor))
    except (IndexError, UnicodeDecodeError) as error:
        raise BundleError(f"a graph is no ONNX file ({error}); build the bundle again") from error


def _mapped(data: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """``data`` with every field ``number`` changed."""
    return b"".join(_wrapped(number, change(value)) if n == number else field for n, value, field in _fields(data))


def _fields(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, value and whole encoding of each field; the value is empty where it has no length."""
    at = 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        kind, value = key & 7, b""
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
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _wrapped(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | LENGTH_DELIMITED) + _encoded(len(value)) + value


def _entry(data: bytes) -> tuple[str, str]:
    texts = {number: value.decode() for number, value, _ in _fields(data)}
    return texts.get(ENTRY_KEY, ""), texts.get(ENTRY_VALUE, "")


def _written(key: str, value: str) -> bytes:
    return _wrapped(ENTRY_KEY, key.encode()) + _wrapped(ENTRY_VALUE, value.encode())
