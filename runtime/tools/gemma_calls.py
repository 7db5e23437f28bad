"""Calls as FunctionGemma and Gemma 4 write them: ``call:NAME{key:value}`` in marks, and texts in marks of their own.

https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.errors import GrammarError, format_value
from llmc.runtime.tools.calls import CallFormat, Spell, Tool
from llmc.runtime.tools.grammar import check_name, literal, without_annotations
from llmc.runtime.tools.json_calls import read_name, take_after_blanks
from llmc.runtime.tools.literals import Literals
from llmc.runtime.tools.source import Called, Reading, Source

_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/",
    "boolean": "/true|false/",
    "null": "/null/",
}
# Keywords that the grammar below keeps, by type.
_KEPT = {"object": {"properties", "required", "additionalProperties"}, "array": {"items"}, "string": {"enum", "const"}}
_MOST_DEEP = 32


@dataclass(frozen=True)
class GemmaCalls(CallFormat):
    """Calls between two marks each, with another mark around every text."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """It holds to types, properties, items and choices, and refuses a schema with more."""
        rules = _Rules(spell(self.quote))
        calls = [
            f"call_{i}: {literal(f'call:{tool.name}')} {rules.value(without_annotations(tool.schema), tool.name)}"
            for i, tool in enumerate(tools)
        ]
        one = f"call {spell(self.end)}"
        more = f" ({spell(self.begin)} {one})*" if parallel else ""
        call = f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"
        return "\n".join([f"calls: {one}{more}", call, *calls, *rules.written, "TEXT_VALUE: /(.|\\n)*/", ""])

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
    """Rules of values, written one by one."""

    def __init__(self, quote: str) -> None:
        self.written: list[str] = []
        self._quote = quote

    def value(self, schema: Any, where: str, depth: int = 0) -> str:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if not isinstance(kind, str) or depth > _MOST_DEEP:
            raise GrammarError(f"{where} has no type, which the model's format of calls needs; give it one")
        unknown = schema.keys() - {"type", *_KEPT.get(kind, ())}
        if unknown:
            raise GrammarError(
                f"{where} has {format_value(sorted(unknown)[0])}, which the model's format of calls cannot hold to; "
                "leave it out"
            )
        return self._rule(self._body(kind, schema, where, depth))

    def _rule(self, body: str) -> str:
        name = f"value_{len(self.written)}"
        self.written.append(f"{name}: {body}")
        return name

    def _body(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if kind == "object":
            return self._object(schema, where, depth)
        if kind == "array":
            item = self.value(schema.get("items"), f"items of {where}", depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "string":
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            inner = "TEXT_VALUE" if values is None else " | ".join(literal(str(value)) for value in values)
            return f"{self._quote} ({inner}) {self._quote}"
        if kind not in _NUMBERS:
            raise GrammarError(f"{where} has the type {format_value(kind)}, expected one of JSON's")
        return _NUMBERS[kind]

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        """Properties in their order, with commas between those that are there."""
        first, more = literal("}"), literal("}")
        required = schema.get("required", ())
        for name, own in reversed(schema.get("properties", {}).items()):
            check_name(name, where)
            item = f"{literal(f'{name}:')} {self.value(own, f'{name} of {where}', depth + 1)}"
            rest = self._rule(more)
            skipped = "" if name in required else f" | {self._rule(first)}"
            first = f"{item} {rest}{skipped}"
            more = f'"," {item} {rest}' + ("" if name in required else f" | {rest}")
        return f'"{{" {self._rule(first)}'
