"""Calls as tags, one per parameter: ``<function=NAME>``, ``<parameter=KEY>``, and a value as plain text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import GrammarError
from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import Parameter, literal, parameters_of, text_without, value_of
from llmc.runtime.tools.json_calls import take_after_blanks
from llmc.runtime.tools.json_values import read_value, stream_text
from llmc.runtime.tools.source import Arguments, Called, Reading, Source

_END = "</parameter>"
_LONGEST_NAME = 256
_NAME = re.compile(rf"[^\s<>]{{1,{_LONGEST_NAME}}}")
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
DEFINITIONS = ("$defs", "definitions")
_ALL_TYPES = frozenset(_TYPES.values())
# Templates write values as Python does.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class XmlCalls(CallFormat):
    """A mark, ``<function=NAME>``, ``<parameter=KEY>VALUE</parameter>`` for each, ``</function>``, a mark.
    ``pad``: text between a parameter's tags and its value."""

    begin: str
    end: str
    pad: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    # ------------------------------------------------------------------------------------------------------- grammar

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = [rule for i, tool in enumerate(tools) for rule in self._rules(i, tool)]
        call = f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"
        one = f"{literal(chr(10))} call {literal(chr(10))} {spell(self.end)}"
        more = f" ({literal(chr(10))} {spell(self.begin)} {one})*" if parallel else ""
        plain = f"plain[lazy]: PLAIN {literal(self.pad + _END)}\nPLAIN: {text_without(_END)}"
        return "\n".join([f"calls: {one}{more}", call, *rules, plain, ""])

    def _rules(self, index: int, tool: Tool) -> list[str]:
        parts, rules = [], []
        for position, parameter in enumerate(parameters_of(tool, _NAME)):
            rules.append(f"value_{index}_{position}: {self._value(tool, parameter)}")
            head = literal(f"<parameter={parameter.name}>{self.pad}")
            part = f"{head} value_{index}_{position} {literal(chr(10))}"
            parts.append(part if parameter.required else f"({part})?")
        head = literal(f"<function={tool.name}>\n")
        return [f"call_{index}: {head} {' '.join(parts)} {literal('</function>')}", *rules]

    def _value(self, tool: Tool, parameter: Parameter) -> str:
        schema, types = resolve_schema(parameter.schema), types_of(parameter.schema)
        closing = literal(self.pad + _END)
        if "string" not in types:
            return f"{value_of(parameter.schema)} {closing}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None and all(_comes_back(value, types) for value in values):
            written = " | ".join(literal(_format_value(value)) for value in values if value != "")
            return f"({written}){'?' * ('' in values)} {closing}" if written else closing
        if values is not None or not _is_plain(schema):
            raise GrammarError(
                "tools",
                f"has in {tool.name} the parameter {parameter.name}, a text with rules; the model's format of calls "
                "writes texts without quotes and cannot enforce rules",
                "leave the rules out",
            )
        return "plain"

    # ------------------------------------------------------------------------------------------------------- reading

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        written = []
        for tool, given in calls:
            parts = "".join(f"<parameter={k}>{self.pad}{_format_value(v)}{self.pad}{_END}\n" for k, v in given.items())
            written.append(f"{self.begin}\n<function={tool}>\n{parts}</function>\n{self.end}")
        return "\n".join(written)

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        yield from source.take(self.begin)
        yield from source.skip_blanks()
        if not (yield from source.take("<function=")):
            return False
        name = yield from source.until(">", _LONGEST_NAME)
        if not name:
            return False
        yield Called(name)
        yield Arguments("{")
        schemas = tools[name].schema if name in tools else {}
        first = True
        while (yield from take_after_blanks(source, "<parameter=")):
            key = yield from source.until(">", _LONGEST_NAME)
            if key is None:
                return True
            yield Arguments(f"{'' if first else ', '}{json.dumps(key)}: ")
            first = False
            if not (yield from _read_value(source, _schema_of(schemas, key), self.pad)):
                return True
        closed = yield from take_after_blanks(source, "</function>")
        if (yield from take_after_blanks(source, self.end)) or closed:
            yield Arguments("}")
        return True


def _schema_of(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    listed = schema.get("properties")
    property_schema = listed.get(key) if isinstance(listed, Mapping) else None
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {**property_schema, **definitions} if isinstance(property_schema, Mapping) else {}


def _read_value(source: Source, schema: Mapping[str, Any], pad: str) -> Reading[bool]:
    """Yield a value as JSON, texts as they come; False if the output ends inside it."""
    types = types_of(schema)
    yield from source.take(pad)
    if types == {"string"}:
        return (yield from stream_text(source, pad + _END, _END))
    start = source.at
    if "string" not in types and (value := (yield from read_value(source))) is not None:
        if (yield from take_after_blanks(source, _END)):  # a tag inside a string of the value ends nothing
            yield Arguments(value)
            return True
        source.at = start
    value = yield from source.until(_END, len(source.text) + 10**9)
    if value is None:
        source.at = len(source.text)
        return False
    yield Arguments(_as_json(value.removesuffix(pad), types))
    return True


def _as_json(value: str, types: frozenset[str]) -> str:
    """A value as JSON of the type it is read as; a string if it can be nothing else."""
    value = value if "string" in types else value.strip()
    spelt = _PYTHON.get(value, value)
    try:
        parsed = json.loads(spelt)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    kind = _TYPES[type(parsed)]
    fits = kind in types or (kind == "integer" and "number" in types)
    if "string" in types and (not fits or kind == "string"):
        return json.dumps(value, ensure_ascii=False)
    return spelt


def types_of(
    schema: Any, root: Mapping[str, Any] | None = None, known: dict[str, frozenset[str]] | None = None
) -> frozenset[str]:
    """The JSON types that a schema allows; all if it names none."""
    if not isinstance(schema, Mapping):
        return _ALL_TYPES
    root, known = (schema if root is None else root), ({} if known is None else known)
    types = _ALL_TYPES
    reference = schema.get("$ref")
    if reference is not None:
        if str(reference) not in known:
            known[str(reference)] = _ALL_TYPES  # for a definition that refers to itself
            known[str(reference)] = types_of(follow_reference(root, reference), root, known)
        types &= known[str(reference)]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list | tuple) else [schema["type"]]
        types &= frozenset(map(str, kinds)) | ({"integer"} if "number" in kinds else frozenset())
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            types &= frozenset().union(*(types_of(item, root, known) for item in schema[key]))
    if "const" in schema or isinstance(schema.get("enum"), list | tuple):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types &= frozenset(_TYPES[type(value)] for value in values if type(value) in _TYPES)
    return types


def resolve_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition that a reference names; any other schema without its definitions."""
    root = schema
    for _ in range(len(root.get("$defs", ())) + len(root.get("definitions", ())) + 1):
        schema = {key: value for key, value in schema.items() if key not in DEFINITIONS}
        target = follow_reference(root, schema["$ref"]) if schema.keys() == {"$ref"} else None
        if not isinstance(target, Mapping):
            break
        schema = target
    return schema


def _is_plain(schema: Any) -> bool:
    """True if the schema restricts nothing but types."""
    if not isinstance(schema, Mapping):
        return False
    if schema.keys() == {"anyOf"} and isinstance(schema["anyOf"], list | tuple):
        return all(_is_plain(item) for item in schema["anyOf"])
    return schema.keys() <= {"type"}


def _comes_back(value: Any, types: frozenset[str]) -> bool:
    """True if a value written as text is read back unchanged."""
    parsed = json.loads(_as_json(_format_value(value), types))
    return parsed == value and type(parsed) is type(value) and _END not in _format_value(value)


def follow_reference(root: Mapping[str, Any], reference: Any) -> Any:
    """The part of a schema that a reference names; None if it does not exist."""
    whole, *names = str(reference).split("/")
    part: Any = root if whole == "#" else None
    for name in names:
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
