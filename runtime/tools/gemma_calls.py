"""Calls of FunctionGemma and Gemma 4: ``call:NAME{key:value}`` between marks, and strings between marks of their own.

https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import GrammarError, format_value
from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import check_name, check_shape, literal, text_without
from llmc.runtime.tools.json_calls import read_name, take_after_blanks
from llmc.runtime.tools.literals import Literals
from llmc.runtime.tools.source import Called, Reading, Source
from llmc.runtime.tools.xml_calls import DEFINITIONS, follow_reference, types_of

_WORDS = {
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/",
    "boolean": "/true|false/",
    "null": "/null/",
}
# Per type: the keywords that the grammar enforces, and those that it refuses.
_KEPT = {"object": {"additionalProperties", "properties", "required"}, "array": {"items"}}
_OF_NUMBERS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}
_REFUSED = {
    "object": {"maxProperties", "minProperties", "patternProperties", "propertyNames", "unevaluatedProperties"},
    "array": {"contains", "maxItems", "minItems", "prefixItems", "unevaluatedItems", "uniqueItems"},
    "string": {"format", "maxLength", "minLength", "pattern"},
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
}
_KNOWN = {"type"}.union(*_KEPT.values(), *_REFUSED.values())
_MOST_DEEP = 32


@dataclass(frozen=True)
class GemmaCalls(CallFormat):
    """Calls between two marks; another mark encloses every string."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """Enforce types, properties, items, choices and alternatives; refuse a schema with other keywords."""
        written: list[str] = []
        calls = [
            f"call_{i}: {literal(f'call:{tool.name}')} {_Rules(self.quote, spell, tool, written).rule}"
            for i, tool in enumerate(tools)
        ]
        one = f"call {spell(self.end)}"
        more = f" ({spell(self.begin)} {one})*" if parallel else ""
        call = f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"
        return "\n".join([f"calls: {one}{more}", call, *calls, *written, *_anything(self.quote, spell), ""])

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        return "".join(f"{self.begin}call:{tool}{self._value(given)}{self.end}" for tool, given in calls)

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self._value(item)}' for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"[{','.join(map(self._value, value))}]"
        return json.dumps(value)

    def read(self, source: Source, tools: Mapping[str, Tool]) -> Reading[bool]:
        yield from source.take(self.begin)
        yield from source.skip_blanks()
        if not (yield from source.take("call:")):
            return False
        name = yield from read_name(source)
        if not name or (yield from source.peek()) != "{":
            return False
        yield Called(name)
        yield from Literals((self.quote,), escapes=False).stream(source)
        yield from take_after_blanks(source, self.end)
        return True


class _Rules:
    """Rules for a tool's values, added to ``written``; ``rule`` is the name of the arguments' rule."""

    def __init__(self, quote: str, spell: Spell, tool: Tool, written: list[str]) -> None:
        self._quote, self._mark, self._written = quote, spell(quote), written
        self._root = check_shape(tool)
        self._references: dict[str, str] = {}
        self.rule = self._value(self._root, tool.name, 0)

    def _value(self, schema: Any, where: str, depth: int) -> str:
        if schema is False or depth > _MOST_DEEP:
            raise GrammarError(
                "tools",
                f"holds {where}, which {'is nested too deeply' if schema else 'allows no value'}",
                "leave it out",
            )
        rules = {} if schema is True else {k: v for k, v in schema.items() if k not in DEFINITIONS}
        if not rules:
            return "anything"
        if "$ref" in rules:
            return self._reference(rules, where, depth)
        union = next((key for key in ("anyOf", "oneOf", "allOf") if key in rules), None)
        if union is not None:
            return self._union(union, rules, where, depth)
        if "const" in rules or "enum" in rules:
            return self._choice(rules, where)
        _refuse_but(rules, _KNOWN, where)
        restricted = (k for k in _REFUSED if k != "integer" and rules.keys() & (_REFUSED[k] | _KEPT.get(k, set())))
        kinds = rules.get("type", [*restricted])
        bodies = [self._of_type(kind, rules, where, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        return self._rule(" | ".join(bodies))

    def _rule(self, body: str) -> str:
        self._written.append(f"value_{len(self._written)}: {body}")
        return f"value_{len(self._written) - 1}"

    def _reference(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """The rule for a definition, which may refer to itself."""
        _refuse_but(schema, {"$ref"}, where)
        name = str(schema["$ref"])
        if name not in self._references:
            meant = follow_reference(self._root, name)
            if not isinstance(meant, Mapping | bool):
                raise GrammarError(
                    "tools", f"refers in {where} to {format_value(name)}, which the schema does not define"
                )
            index = len(self._written)
            self._references[name] = self._rule("")
            self._written[index] += self._value(meant, where, depth + 1)
        return self._references[name]

    def _union(self, union: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """The rule for alternatives; the alternatives of ``oneOf`` must have disjoint types or be single values."""
        _refuse_but(schema, {union, "type"}, where)
        alternatives = [{} if item is True else item for item in schema[union] if item is not False]
        types = [types_of(item, self._root) for item in alternatives]
        differ = all("const" in item for item in alternatives) or len(frozenset().union(*types)) == sum(map(len, types))
        if not alternatives or (union == "allOf" and len(schema[union]) > 1) or (union == "oneOf" and not differ):
            _refuse_but(schema, {"type"}, where)
        if "type" in schema:
            if any(item.get("type", schema["type"]) != schema["type"] for item in alternatives):
                _refuse_but(schema, {union}, where)
            alternatives = [{"type": schema["type"], **item} for item in alternatives]
        return self._rule(" | ".join([self._value(item, where, depth + 1) for item in alternatives]))

    def _choice(self, schema: Mapping[str, Any], where: str) -> str:
        """The rule for single values of the schema's type that the format can write."""
        _refuse_but(schema, {"const", "enum", "type"}, where)
        types = types_of(schema)
        values = [v for v in schema.get("enum", [schema.get("const")]) if "const" not in schema or v == schema["const"]]
        texts = [v for v in values if isinstance(v, str) and "string" in types and self._quote not in v]
        plain = [v for v in values if v is None or isinstance(v, int | float)]
        bodies = [f"{self._mark} {literal(text)} {self._mark}" for text in texts]
        bodies += [literal(json.dumps(value)) for value in plain if types_of({"const": value}) & types]
        if not bodies:
            raise GrammarError(
                "tools", f"has in {where} no choice that the model's format of calls can write", "leave it out"
            )
        return self._rule(" | ".join(bodies))

    def _of_type(self, kind: Any, schema: Mapping[str, Any], where: str, depth: int) -> str:
        _refuse_but(schema, schema.keys() - _REFUSED.get(kind, set()) if isinstance(kind, str) else (), where)
        if kind == "object":
            return self._object(schema, where, depth)
        if kind == "array":
            items = schema.get("items", True)
            _refuse_but({} if isinstance(items, Mapping | bool) else {"items": items}, (), where)
            return _list_of(self._value(items, f"items of {where}", depth + 1))
        if kind == "string":
            return "text"
        if kind not in _WORDS:
            raise GrammarError("tools", f"has in {where} the type {format_value(kind)}, expected one of JSON's")
        return _WORDS[kind]

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """Listed properties in order, with commas between those present; any property if none are listed."""
        listed, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in listed]:
            raise GrammarError(
                "tools", f"requires in {where} {format_value(missing[0])}, which is not one of its properties"
            )
        extra = schema.get("additionalProperties", True)
        if "properties" not in schema and extra is not False:
            return _map_of(self._value(extra, f"values of {where}", depth + 1))
        first, more = literal("}"), literal("}")
        for name, property_schema in reversed(listed.items()):
            check_name(name, where)
            item = f"{literal(f'{name}:')} {self._value(property_schema, f'{name} of {where}', depth + 1)}"
            rest = self._rule(more)
            skipped = "" if name in required else f" | {self._rule(first)}"
            first = f"{item} {rest}{skipped}"
            more = f'"," {item} {rest}' + ("" if name in required else f" | {rest}")
        return f'"{{" {self._rule(first)}'


def _refuse_but(schema: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = sorted(schema.keys() - set(known))
    if unknown:
        raise GrammarError(
            "tools",
            f"has in {where} {format_value(unknown[0])}, which the model's format of calls cannot enforce",
            "leave it out",
        )


def _anything(quote: str, spell: Spell) -> list[str]:
    """The rules for values of any type. Strings do not contain the mark that ends them."""
    mark = spell(quote)
    is_token = mark.startswith("<[")
    return [
        f"text: {mark} TEXT_VALUE {mark}" if is_token else f"text: {mark} rest\nrest[lazy]: TEXT_VALUE {mark}",
        f"TEXT_VALUE: {text_without(quote)}",
        f"anything: text | {' | '.join(_WORDS.values())} | {_list_of('anything')} | {_map_of('anything')}",
        "KEY: /[A-Za-z0-9_.-]{1,64}/",
    ]


def _list_of(item: str) -> str:
    return f'"[" ({item} ("," {item})*)? "]"'


def _map_of(value: str) -> str:
    return f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"'
