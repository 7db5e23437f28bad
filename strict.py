"""JSON that somebody else wrote: files read within bounds, and values decoded into dataclasses within their ranges.

Whoever wrote a bundle or a checkpoint may mean harm, so a file is regular, a text has a size, a depth and numbers with
so many digits, and a field has a range: what goes beyond is refused before anything is computed from it.
"""

import json
import os
import stat
import types
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from llmc.errors import BundleError

# Bytes of a JSON file that is read into Python's objects, which take some twenty times as much: a vocabulary of a
# quarter of a million tokens with its merges has 35 MB, and any other file far less.
MOST_JSON = 128 << 20
# Objects and arrays inside one another; the deepest that llmc or a checkpoint of a known family writes has 12.
DEEPEST_JSON = 64
# Of one integer. Tokenizers write 10**30 for "no limit"; nothing else is beyond 64 bits.
MOST_DIGITS = 40


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a FIFO, a device or a folder in its place neither hangs nor is read.

    Raises:
        OSError: there is none, or it cannot be opened.
        ValueError: it is something else than a regular file, or the path is none.
    """
    # A FIFO without a writer would hold up who opens it, and Windows would change the ends of lines.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is larger, or something else than a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, at most {most} are expected")
        content = file.read(size + 1)
    if len(content) != size:
        raise ValueError("it changed while it was read")
    return content


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """The value in a JSON file in UTF-8: a regular file of at most ``most`` bytes, parsed by :func:`parse_json`.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no JSON, or beyond a bound; the message is a clause such as "it has ... bytes".
    """
    return parse_json(read_bytes(path, most))


def parse_json(content: bytes) -> Any:
    """The value that JSON in UTF-8 describes, at most 64 levels deep, with integers of at most 40 digits.

    Raises:
        ValueError: it is no JSON, or beyond a bound.
    """
    too_deep = f"it nests more than {DEEPEST_JSON} levels deep"
    try:
        value = json.loads(content.decode("utf-8"), parse_int=_integer)
    except RecursionError:
        raise ValueError(too_deep) from None
    boxes = _boxes([value])
    for _ in range(DEEPEST_JSON):
        boxes = [inner for box in boxes for inner in _boxes(box.values() if type(box) is dict else box)]
        if not boxes:
            return value
    raise ValueError(too_deep)


def _boxes(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) in (dict, list)]


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits, at most {MOST_DIGITS} are expected")
    return int(digits)


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Turn parsed JSON into the dataclass, tuple, dict or scalar that ``kind`` names, strictly.

    Raises:
        BundleError: a field is missing, unknown or of another type; the message names its place.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: decode(arguments[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin is types.UnionType:
        return None if data is None else decode(arguments[0], data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if (isinstance(kind, type) and type(data) is kind) or (origin is typing.Literal and data in arguments):
        return data
    expected = f"one of {', '.join(arguments)}" if origin is typing.Literal else getattr(kind, "__name__", kind)
    raise BundleError(f"{where or 'value'} is {data!r:.60}, expected {expected}")


def _decode_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise BundleError(f"{where or kind.__name__} is {data!r:.60}, expected an object")
    hints = _type_hints(kind)
    names = {field.name for field in fields(kind)}
    for problem, keys in (("unknown", data.keys() - names), ("missing", names - data.keys())):
        if keys:
            raise BundleError(f"{problem} field {where}{'.' if where else ''}{min(keys)}")
    return kind(**{name: decode(hints[name], data[name], f"{where}.{name}".lstrip(".")) for name in names})


_type_hints = cache(typing.get_type_hints)  # of a hundred linears they are the same
