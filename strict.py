"""Read JSON from untrusted bundles and checkpoints: bounded files, decoded into dataclasses with bounded values.

Files must be regular; size, depth, digits of numbers and ranges of fields are limited. Data beyond a limit is refused
before anything is computed from it.
"""

import json
import os
import re
import stat
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from llmc.errors import BundleError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Bytes of a JSON file; its Python objects take about twenty times as much. A vocabulary of 250,000 tokens with its
# merges has 35 MB, any other file far less.
MOST_JSON = 128 << 20
# Nesting of objects and arrays; the deepest that llmc or a checkpoint of a known family writes is 12.
DEEPEST_JSON = 64
# Digits of an integer. Tokenizers write 10**30 for "no limit"; nothing else exceeds 64 bits.
MOST_DIGITS = 40


# Characters that Python's str.splitlines treats as line ends and json.dumps does not escape.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def escape_line_ends(text: str) -> str:
    """JSON text without indentation as a single line: U+0085, U+2028 and U+2029 are escaped."""
    return text if text.isascii() else _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; refuse a FIFO, a device or a folder without blocking.

    Raises:
        OSError: the file is missing or cannot be opened.
        ValueError: it is not a regular file, or the path is invalid.
    """
    # Without these flags, opening a FIFO without a writer would block, and Windows would change line ends.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes. Raises OSError: unreadable; ValueError: larger, not regular."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, expected at most {most}")
        content = file.read(size + 1)
    if len(content) != size:
        raise ValueError("it changed while it was read")
    return content


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """The value in a UTF-8 JSON file: a regular file of at most ``most`` bytes, parsed by :func:`parse_json`.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is not JSON, or exceeds a bound; the message is a clause such as "it has ... bytes".
    """
    return parse_json(read_bytes(path, most))


TomlError = tomllib.TOMLDecodeError


def parse_toml(content: bytes) -> dict[str, Any]:
    """The tables in UTF-8 TOML. Raises ValueError: it is not TOML (:data:`TomlError`), or nested too deeply."""
    try:
        tables: dict[str, Any] = tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it nests too deep") from None
    return tables


def parse_json(content: bytes) -> Any:
    """The value of UTF-8 JSON, at most 64 levels deep, with integers of at most 40 digits.
    Raises ValueError: it is not JSON, or exceeds a bound."""
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
        raise ValueError(f"it holds an integer of {len(digits)} digits, expected at most {MOST_DIGITS}")
    return int(digits)


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Decode parsed JSON strictly into ``kind``: a dataclass, tuple, dict or scalar.

    ``Annotated[int, range(1, 9)]`` bounds a number; for a tuple or a dict, a range bounds the number of items. Floats
    are finite, and texts hold no control characters, which a terminal would obey.

    Raises:
        BundleError: a field is missing, unknown, or has a wrong type or value; the message names its path.
    """
    return _decoder(kind)(data, (where,))


# Path of a value, innermost name first; only formatted for errors.
_Location = tuple[Any, ...]
_Decoder = Callable[[Any, _Location], Any]


@cache
def _decoder(kind: Any) -> _Decoder:
    """The function that decodes values of a kind; cached, since a manifest has thousands of values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _make_bounded(arguments[1], _decoder(arguments[0]))
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind)
    if origin in (tuple, dict):
        return _container(origin, _decoder(arguments[0 if origin is tuple else 1]))
    if origin in (types.UnionType, typing.Union):  # ``Annotated | None`` makes the latter
        inner = _decoder(arguments[0])
        return lambda data, location: None if data is None else inner(data, location)
    if kind is float:
        return _finite
    if kind is str:
        return _text
    return _scalar(kind, arguments)


def _object(kind: type) -> _Decoder:
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field.name: _decoder(hints[field.name]) for field in fields(kind)}

    def read(data: Any, location: _Location) -> Any:
        if not isinstance(data, dict):
            raise BundleError(f"{_format_location(location) or kind.__name__} is {data!r:.60}, expected an object")
        for problem, keys in (("unknown", data.keys() - readers), ("missing", readers.keys() - data)):
            if keys:
                raise BundleError(f"{problem} field {_format_location((f'.{ascii(min(keys))[1:-1]:.60}', location))}")
        return kind(**{name: read_field(data[name], (f".{name}", location)) for name, read_field in readers.items()})

    return read


def _container(kind: type, read_item: _Decoder) -> _Decoder:
    def read_tuple(data: Any, location: _Location) -> Any:
        if type(data) is not list:
            raise _other(data, location, "tuple")
        return tuple([read_item(item, (i, location)) for i, item in enumerate(data)])

    def read_dict(data: Any, location: _Location) -> Any:
        if type(data) is not dict:
            raise _other(data, location, "dict")
        return {_text(key, location): read_item(item, (f".{key}", location)) for key, item in data.items()}

    return read_tuple if kind is tuple else read_dict


def _make_bounded(values: range, read_inner: _Decoder) -> _Decoder:
    def read(data: Any, location: _Location) -> Any:
        number = data if type(data) is int else len(data) if type(data) in (list, dict) else None
        if number is not None and number not in values:
            what = "" if number is data else " items"
            raise _other(number, location, f"{values.start} ... {values.stop - 1}", what)
        return read_inner(data, location)

    return read


def _scalar(kind: Any, choices: tuple[Any, ...]) -> _Decoder:
    expected = f"one of {', '.join(choices)}" if choices else getattr(kind, "__name__", kind)

    def read(data: Any, location: _Location) -> Any:
        if type(data) is not kind and not (choices and type(data) is str and data in choices):
            raise _other(data, location, expected)
        return data

    return read


def _finite(data: Any, location: _Location) -> float:
    if type(data) not in (int, float):
        raise _other(data, location, "float")
    if not abs(data) <= sys.float_info.max:  # also refuses NaN, and integers too large for a float
        raise _other(data, location, "a finite number")
    return float(data)


def _text(data: Any, location: _Location) -> str:
    if type(data) is not str:
        raise _other(data, location, "str")
    if not data.isprintable() and (wrong := _CONTROLS.search(data)):
        raise BundleError(f"{_format_location(location)} is {data!a:.60}, expected text without U+{ord(wrong[0]):04X}")
    return data


def _other(value: Any, location: _Location, expected: str, what: str = "") -> BundleError:
    return BundleError(f"{_format_location(location) or 'value'} is {value!r:.60}{what}, expected {expected}")


def _format_location(location: _Location) -> str:
    names = []
    while location:
        name, location = location[0], location[1] if len(location) > 1 else ()
        names.append(f"[{name}]" if isinstance(name, int) else name)
    return "".join(reversed(names)).lstrip(".")


# Control characters, characters that change the direction of text, and unpaired surrogates.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
