"""Grammars of answers that call tools, in llguidance's Lark: the marks, names and schemas that calls must follow.

A call format writes the rule ``calls`` for the text after its opening mark; here the rule is combined with the text
that an answer may have before it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import GrammarError, format_value
from llmc.runtime.guided.json_schema import ANNOTATIONS
from llmc.runtime.tools.calls import Spell, Tool

_NAMED = {"$defs", "definitions", "patternProperties", "properties"}
_VALUES = {"const", "enum"}
_SHAPES: dict[str, Any] = {
    "parameters": Mapping,
    "type": str | list | tuple,
    **dict.fromkeys(_NAMED, Mapping),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "required"), list | tuple),
}
# Keywords of a tool's parameters that formats other than JSON can enforce.
_OF_PARAMETERS = {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}

NAME = re.compile(r"[\w.-]+")
_EXTENSION = re.compile("x-(?!guidance$)")  # a vendor's own annotation


@dataclass(frozen=True)
class Parameter:
    """One of a tool's parameters."""

    name: str
    schema: dict[str, Any]  # with the definitions that it may refer to
    required: bool  # True if every call must have it


def literal(value: str) -> str:
    """A terminal for a text; empty for an empty text."""
    # Escaped, because "::=" would make the grammar look like llama.cpp's notation.
    return json.dumps(value, ensure_ascii=False).replace("::=", ":\\u003a=") if value else ""


def text_without(mark: str) -> str:
    """A terminal for any text that does not contain a mark."""
    escaped = re.sub(r"[^A-Za-z0-9_ ]", lambda match: f"\\x{ord(match[0]):02x}", mark)
    return f"/(.|\\n)*/ & ~/(.|\\n)*{escaped}(.|\\n)*/"


def spell_run(text: str, spell: Spell) -> str:
    """Terminals for a text that contains marks."""
    return " ".join(spell(part) for part in re.split(r"(<\|\w+\|>)", text) if part)


def schema_of(tool: Tool) -> str:
    return value_of(tool.schema)


def value_of(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(without_annotations(schema))}".replace("::=", ":\\u003a=")


def without_annotations(schema: Any) -> Any:
    """The schema's restricting keywords only: annotations are most of a schema's text, and a grammar's length is
    limited. A ``null`` is dropped, since clients write it for a keyword that is not given."""
    if isinstance(schema, list | tuple):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: without_annotations(item) for name, item in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif value is None or _EXTENSION.match(key):
            continue
        elif key not in ANNOTATIONS or (key == "$id" and "$ref" in schema):  # the drafts differ about such an $id
            kept[key] = without_annotations(value)
    return kept


def move(schema: Any, place: str) -> Any:
    """A schema with its references corrected for its new path ``place`` inside another schema."""
    if isinstance(schema, list | tuple):
        return [move(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    moved = {"$ref": f"#{place}{reference[1:]}"} if isinstance(reference, str) and reference.startswith("#") else {}
    return {name: move(value, place) for name, value in schema.items()} | moved


def check_shape(tool: Tool) -> dict[str, Any]:
    """The parameters without annotations, for formats that write them one by one.
    Raises GrammarError: they are not a JSON schema."""
    schema: dict[str, Any] = without_annotations(tool.schema)
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            continue
        for name, value in node.items() if isinstance(node, Mapping) else [("parameters", node)]:
            fits = isinstance(value, _SHAPES.get(name, object))
            if not fits or (name == "required" and not all(isinstance(each, str) for each in value)):
                raise GrammarError(
                    "tools", f"holds {name} {format_value(value)} in {tool.name}, expected a JSON schema"
                )
            if name in _NAMED:
                waiting += value.values()
            elif name in ("additionalProperties", "items"):
                waiting += value if isinstance(value, list) else [value]
            elif name in ("allOf", "anyOf", "oneOf"):
                waiting += value
    return schema


def parameters_of(tool: Tool, names: re.Pattern[str] = NAME) -> Iterator[Parameter]:
    """The parameters of a tool one by one, for formats that write them so; ``names``: the names they can write."""
    schema = check_shape(tool)
    unknown = schema.keys() - _OF_PARAMETERS
    if unknown:
        raise GrammarError(
            "tools",
            f"has {format_value(sorted(unknown)[0])} beside the properties of {tool.name}, which the model's format of "
            "calls cannot enforce",
            "leave it out",
        )
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", ())
    listed = schema.get("properties", {})
    missing = next((name for name in required if name not in listed), None)
    if missing is not None:
        raise GrammarError(
            "tools", f"requires in {tool.name} {format_value(missing)}, which is not one of its properties"
        )
    for name, item in listed.items():
        check_name(name, tool.name, names)
        item_schema = item if isinstance(item, Mapping) else {} if item is True else {"not": {}}
        yield Parameter(name, {**item_schema, **definitions}, name in required)


def check_name(name: str, where: str, names: re.Pattern[str] = NAME) -> None:
    """Refuse a parameter name that the format cannot write without quotes."""
    if not names.fullmatch(name):
        raise GrammarError(
            "tools",
            f"has in {where} the parameter {format_value(name)}, which the model's format of calls cannot write "
            "without quotes",
            "rename it, to letters, digits, _, - and .",
        )


def answer_grammar(
    calls: str, begins: Sequence[str], *, begin: str, special: bool, required: bool, frame: Sequence[str], other: str
) -> str:
    """The grammar of an answer.

    Args:
        calls: the rule ``calls`` for the text after the opening mark, and the rules it needs.
        begins: terminals of the possible opening marks.
        begin: the text of the opening mark, if it is ordinary text.
        special: True if the marks are special tokens, which text cannot contain.
        required: True if the answer must be calls only.
        frame: terminals before and after an answer without calls, if any.
        other: the rule ``other`` for an answer without calls, and the rules it needs; empty for any text.
    """
    opener = " | ".join(begins)
    if required:
        return f"start: ({opener}) calls\n{calls}"
    before, after = (f"({terminals})? " if terminals else "" for terminals in frame)
    if other:
        return f"start: ({opener}) calls | {before}other {after}\n{other}\n{calls}"
    if special:
        return f"start: TEXT? ({opener}) calls | {before}TEXT {after}\nTEXT: /(.|\\n)*/\n{calls}"
    return (
        f"start: TEXT | head calls\nTEXT: {text_without(begin)}\n"
        f"head[lazy]: ANY {literal(begin)}\nANY: /(.|\\n)*/\n{calls}"
    )


def bare_grammar(calls: str, begins: Sequence[str], *, start: str, required: bool, other: str) -> str:
    """The grammar of an answer that is a call if it begins like one, with or without an opening mark.

    Args:
        calls, begins, required, other: as in :func:`answer_grammar`.
        start: a regular expression for the beginning of a call.
    """
    optional = f"({' | '.join(begins)})? " if begins else ""
    if required:
        return f"start: {optional}calls\n{calls}"
    if other:
        return f"start: {optional}calls | other\n{other}\n{calls}"
    return f"start: {optional}calls | TEXT\nTEXT: /(.|\\n)*/ & ~/[ \\n\\t]*{start}(.|\\n)*/\n{calls}"
