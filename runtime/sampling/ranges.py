"""Ranges of values: one check each, with its wording for errors, documentation and the command line."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc.errors import UsageError, format_value


@dataclass(frozen=True)
class Range:
    """A set of values. ``holds`` tests a value; errors show ``expected``, documentation shows ``short``.

    ``kind`` is integer, number, flag, choice, text, texts, words, tokens, biases or schema; ``note`` says which value
    switches the parameter off; ``choices`` lists the values if they are few and named.
    """

    kind: str
    expected: str
    holds: Callable[[Any], bool]
    short: str = ""
    note: str = ""
    choices: tuple[str | bool, ...] = ()

    def check(self, name: str, value: object, path: Path | None = None) -> None:
        """Raise UsageError if ``value`` is out of range, for the parameter ``name`` (a key of the file ``path``)."""
        if not self.holds(value):
            raise UsageError(name, f"is {format_value(value)}, expected {self.expected}", path=path)


@dataclass(frozen=True)
class Parameter:
    """A parameter's only definition: its check, its option and its row of documentation follow from it.

    ``meaning`` is a sentence without capital and full stop, with names in backticks; ``short`` overrides the range's;
    ``more`` appears only in the documentation; a command line lists ``common`` parameters first.
    """

    range: Range
    meaning: str
    section: str
    short: str = ""
    more: str = ""
    source: str = ""
    common: bool = False


def parameter(default: object, values: Range, meaning: str, section: str, **rest: Any) -> Any:
    """A dataclass field whose metadata is the :class:`Parameter` that these arguments describe."""
    return field(default=default, metadata={"parameter": Parameter(values, meaning, section, **rest)})


# ----------------------------------------------------------------------------------------------------------- checks

LARGEST = (1 << 64) - 1  # bound of integers without their own: arithmetic also converts them to float


def _is_integer(value: object, low: float, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= min(high, LARGEST)


def _is_number(value: object, low: float, high: float) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and low <= value <= high
    except OverflowError:  # an integer beyond float
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token(value: object) -> bool:
    return _is_integer(value, 0)


def _is_tuple(value: object, is_item: Callable[[Any], bool], most: float = math.inf) -> bool:
    return isinstance(value, tuple) and len(value) <= most and all(map(is_item, value))


# ----------------------------------------------------------------------------------------------------------- ranges

FLAG = Range("flag", "true or false", lambda value: isinstance(value, bool))
TEXT = Range("text", "a non-empty string", _is_text, "text")
# For parameters that bound their texts themselves.
TEXTS = Range("texts", "a list of non-empty strings", lambda value: _is_tuple(value, _is_text), "texts")
SCHEMA = Range(
    "schema",
    "a JSON schema as an object or a text",
    lambda value: _is_text(value) or isinstance(value, Mapping),
    "mapping or JSON text",
)


def integer(low: int, high: float = math.inf, note: str = "", most: str = "") -> Range:
    """Integers from ``low`` to ``high``, which the texts write as ``most``."""
    return _numbers("integer", "an integer", _is_integer, low, high, note, most)


def number(low: float, high: float = math.inf, note: str = "") -> Range:
    return _numbers("number", "a number", _is_number, low, high, note)


def _numbers(
    kind: str,
    name: str,
    holds: Callable[[object, float, float], bool],
    low: float,
    high: float,
    note: str,
    most: str = "",
) -> Range:
    short = f"from {low}" if high == math.inf else f"{low} to {most or high}"
    text = f"of at least {low}" if high == math.inf else f"from {short}"
    remark = f" ({note})" if note else ""
    return Range(kind, f"{name} {text}{remark}", lambda value: holds(value, low, high), short, note)


def above(low: float, high: float = math.inf) -> Range:
    """Finite numbers above ``low``, up to ``high``."""
    text, short = ("", "") if high == math.inf else (f" and at most {high}", f", to {high}")
    holds = number(low, high).holds
    return Range(
        "number", f"a number above {low}{text}", lambda value: holds(value) and value > low, f"above {low}{short}"
    )


def one_of(*choices: str | bool) -> Range:
    """A few named values."""

    def holds(value: object) -> bool:
        return any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)

    short = ", ".join(f"`{choice}`" if isinstance(choice, str) else str(choice) for choice in choices)
    expected = " or ".join(repr(choice) if isinstance(choice, str) else str(choice).lower() for choice in choices)
    return Range("choice", expected, holds, short, choices=choices)


def texts(most: int, longest: int) -> Range:
    """Tuples of at most ``most`` non-empty texts of ``longest`` characters in all."""

    def holds(value: Any) -> bool:
        return _is_tuple(value, _is_text, most) and sum(map(len, value)) <= longest

    bounds = f"{most:,} texts of {longest:,} characters in all"
    return Range("texts", f"a list of non-empty strings, at most {bounds}", holds, f"up to {bounds}")


def words(most: int, longest: int) -> Range:
    """Tuples of at most ``most`` texts and tuples of token ids, with ``longest`` characters and ids in all."""

    def is_word(value: Any) -> bool:
        return _is_text(value) or (_is_tuple(value, _is_token) and len(value) > 0)

    def holds(value: Any) -> bool:
        return _is_tuple(value, is_word, most) and sum(map(len, value)) <= longest

    items, bounds = "non-empty strings and lists of token ids", f"of {longest:,} characters and ids in all"
    expected = f"a list of {items}, at most {most:,} of them {bounds}"
    return Range("words", expected, holds, f"up to {most:,} texts or lists of token ids {bounds}")


def tokens(most: int) -> Range:
    expected = f"a list of token ids, at most {most:,} of them"
    return Range("tokens", expected, lambda value: _is_tuple(value, _is_token, most), f"up to {most:,} token ids")


def biases(size: float, most: int) -> Range:
    """Tuples of at most ``most`` pairs (token id, number from -size to size), with different ids."""
    pair, fits = f"-{size} to {size}", number(-size, size).holds

    def holds(value: Any) -> bool:
        pairs = _is_tuple(value, lambda pair: isinstance(pair, tuple) and len(pair) == 2, most)
        return (
            pairs and all(_is_token(token) and fits(bias) for token, bias in value) and len(dict(value)) == len(value)
        )

    expected = f"a list of (token id, number from {pair}) with different ids, at most {most:,} of them"
    return Range("biases", expected, holds, f"up to {most:,} (id, {pair}) pairs")


def drop_empty(values: Range) -> Range:
    """The tuples of a range, except the empty one."""
    expected = values.expected.replace("a list", "a non-empty list")
    return replace(values, expected=expected, holds=lambda value: values.holds(value) and value != ())


def optional(values: Range) -> Range:
    return replace(
        values, expected=f"{values.expected}, or null", holds=lambda value: value is None or values.holds(value)
    )
