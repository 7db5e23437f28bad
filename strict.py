"""Parsed JSON into dataclasses, strictly: nothing missing, nothing unknown, nothing of another type."""

import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from llmc.errors import BundleError


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
