"""Whole outputs at random logits, against re, json and parsers written for the purpose."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from llmc.runtime.guided import json_schema

# ------------------------------------------------------------------------------------------------------------ oracles


def validate(schema: Any, value: Any, root: Any) -> bool:
    """JSON Schema as far as the tests need it (https://json-schema.org/draft/2020-12/json-schema-validation)."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return validate(target, value, root)
    return all(check(schema, value, root) for name, check in CHECKS.items() if name in schema)


TYPES = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool}


def has_type(schema: Any, value: Any, root: Any) -> bool:
    if schema["type"] in ("integer", "number"):
        return isinstance(value, int if schema["type"] == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, TYPES[schema["type"]])


def has_properties(schema: Any, value: Any, root: Any) -> bool:
    known = schema["properties"]
    others = schema.get("additionalProperties", True)
    return isinstance(value, dict) and all(validate(known.get(name, others), value[name], root) for name in value)


CHECKS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "type": has_type,
    "properties": has_properties,
    "required": lambda schema, value, root: set(schema["required"]) <= value.keys(),
    "items": lambda schema, value, root: all(validate(schema["items"], item, root) for item in value),
    "minItems": lambda schema, value, root: len(value) >= schema["minItems"],
    "maxItems": lambda schema, value, root: len(value) <= schema["maxItems"],
    "minLength": lambda schema, value, root: len(value) >= schema["minLength"],
    "maxLength": lambda schema, value, root: len(value) <= schema["maxLength"],
    "pattern": lambda schema, value, root: re.search(schema["pattern"], value) is not None,
    "minimum": lambda schema, value, root: value >= schema["minimum"],
    "maximum": lambda schema, value, root: value <= schema["maximum"],
    "enum": lambda schema, value, root: value in schema["enum"],
    "const": lambda schema, value, root: value == schema["const"],
    "anyOf": lambda schema, value, root: any(validate(option, value, root) for option in schema["anyOf"]),
}

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 3, "maximum": 141},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        "kind": {"enum": ["cat", "dog", 7, None]},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "é"}]}, "maxItems": 3},
    },
    "required": ["name", "age", "code", "kind"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}

ARITHMETIC_LARK = 'start: term ("+" term)*\nterm: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
ARITHMETIC_GBNF = 'root ::= term ("+" term)*\nterm ::= "(" root ")" | number\nnumber ::= [0-9] [0-9]? [0-9]?'


def is_arithmetic(text: str) -> bool:
    """Reads the language of the two grammars above from left to right."""

    def sum_from(at: int) -> int:
        at = term_from(at)
        while at >= 0 and text[at : at + 1] == "+":
            at = term_from(at + 1)
        return at

    def term_from(at: int) -> int:
        if text[at : at + 1] == "(":
            at = sum_from(at + 1)
            return at + 1 if at >= 0 and text[at : at + 1] == ")" else -1
        digits = len(text[at : at + 4]) - len(text[at : at + 4].lstrip("0123456789"))
        return at + digits if 1 <= digits <= 3 else -1

    return sum_from(0) == len(text)


# ----------------------------------------------------------------------------------------------------- whole outputs

REGEXES = [
    r"[a-c]{3,5}",
    r"(GET|PUT) /[a-zé]{1,8}\?id=[0-9]+",
    r"-?[0-9]{1,3}(\.[0-9]{2})?",
    r"[^a-zA-Z]{1,4}é+!",
    r"^ab?$",
]
CHOICES = ("yes", "no", "not yet", "né 🎉", 'say "hi"\\\n', "北京")


class TestOutputs:
    @pytest.mark.parametrize("regex", REGEXES)
    def test_match_the_regex(self, vocabulary: Any, regex: str) -> None:
        assert all(re.fullmatch(regex, text) for text in vocabulary.outputs(regex=regex))

    def test_are_all_of_the_choices_and_no_other(self, vocabulary: Any) -> None:
        assert set(vocabulary.outputs(walks=60, choice=CHOICES)) == set(CHOICES)

    @pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
    def test_are_json_of_the_schema(self, vocabulary: Any, schema: dict[str, Any]) -> None:
        assert all(validate(schema, json.loads(text), schema) for text in vocabulary.outputs(json_schema=schema))

    def test_of_a_schema_and_of_its_text_are_the_same(self, tiny: Any) -> None:
        assert list(tiny.outputs(json_schema=PERSON)) == list(tiny.outputs(json_schema=json.dumps(PERSON)))

    @pytest.mark.parametrize("grammar", [ARITHMETIC_LARK, ARITHMETIC_GBNF], ids=["lark", "gbnf"])
    def test_follow_the_grammar(self, vocabulary: Any, grammar: str) -> None:
        assert all(is_arithmetic(text) for text in vocabulary.outputs(grammar=grammar))

    @pytest.mark.parametrize(
        ("rule", "text"),
        [
            (r'"\u0041BCD"', "ABCD"),
            (r'"\u00e9ab"', "éab"),
            (r'"\U0001F389!"', "🎉!"),
            (r'"\u4e2d\u0022\u005c"', '中"\\'),
            (r'"\x41B" [\u0043-\u0043]', "ABC"),
            (r'"\\u0041"', r"\u0041"),
        ],
    )
    def test_follow_escapes_of_gbnf(self, tiny: Any, rule: str, text: str) -> None:
        assert set(tiny.outputs(grammar=f"root ::= {rule}\n")) == {text}

    def test_never_spell_a_property_in_a_second_way(self, tiny: Any) -> None:
        """A name that is escaped would escape its own rule: {"a": 1, "\\u0061": "x"} is JSON of the wrong type."""
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        guide = tiny.start(json_schema=schema)
        for token in tiny.spell(b'{"a":1,"\\'):
            guide.accept(token)
        following = {(tiny.spellings[token] or b"")[:1] for token in tiny.allowed(guide)}
        assert following == {b'"', b"\\", b"b", b"f", b"n", b"r", b"t"}

    def test_without_a_guide_break_every_rule(self, tiny: Any) -> None:
        """The planted error: what the walks and oracles above do with no mask."""

        class Free:
            finished = False

            def mask(self, logits: Any) -> Any:
                return logits

            def accept(self, token: int) -> None: ...

        free: Any = Free()
        text = b"".join(tiny.spellings[token] or b"" for token in tiny.walk(free, 0, 20) if token < len(tiny.spellings))
        assert not any(re.fullmatch(regex, text.decode(errors="replace")) for regex in REGEXES)
        assert not is_arithmetic(text.decode(errors="replace"))
        with pytest.raises(ValueError):
            json.loads(text)


class TestOracles:
    @pytest.mark.parametrize(
        "change", [{"age": 2}, {"name": ""}, {"code": "A-1"}, {"kind": 8}, {"tags": [1]}, {"x": 1}]
    )
    def test_refuse_what_breaks_the_schema(self, change: dict[str, Any]) -> None:
        person = {"name": "a", "age": 3, "code": "AB-1", "kind": None, "tags": [True]}
        assert validate(PERSON, person, PERSON)
        assert not validate(PERSON, person | change, PERSON)

    def test_refuse_what_breaks_the_grammar(self) -> None:
        assert is_arithmetic("(1+22)+333")
        assert not any(is_arithmetic(text) for text in ["", "1+", "(1", "1)", "1234", "1 + 2"])


# A schema, a text that follows it and one that breaks it, for every keyword that is not a mere annotation.
KEYWORDS: list[tuple[dict[str, Any], str, str]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, "null", "1"),
    ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}}, "null", "1"),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}, '"a"', '"aa"'),
    ({"items": [{"type": "null"}], "additionalItems": False, "type": "array"}, "[null]", "[null,1]"),
    ({"additionalProperties": {"type": "null"}, "type": "object"}, '{"a":null}', '{"a":1}'),
    ({"allOf": [{"type": "string"}, {"minLength": 2}]}, '"ab"', '"a"'),
    ({"anyOf": [{"type": "null"}, {"const": 3}]}, "3", "4"),
    ({"oneOf": [{"type": "null"}, {"const": 3}]}, "3", "4"),
    ({"const": {"a": [1, "b"]}}, '{"a":[1,"b"]}', '{"a":[1,"c"]}'),
    ({"enum": [1, "a"], "type": "string"}, '"a"', "1"),
    ({"exclusiveMaximum": 3, "type": "integer"}, "2", "3"),
    ({"exclusiveMinimum": 3, "type": "integer"}, "4", "3"),
    ({"format": "date", "type": "string"}, '"2024-02-29"', '"2024-02-30"'),
    ({"items": {"type": "null"}, "type": "array"}, "[null]", "[1]"),
    ({"maxItems": 1, "type": "array"}, "[1]", "[1,1]"),
    ({"maxLength": 2, "type": "string"}, '"é🎉"', '"abc"'),
    ({"maxProperties": 1, "type": "object"}, '{"a":1}', '{"a":1,"b":1}'),
    ({"maximum": 2.5, "type": "number"}, "2.5", "2.6"),
    ({"minItems": 2, "type": "array"}, "[1,1]", "[1]"),
    ({"minLength": 2, "type": "string"}, '"é🎉"', '"🎉"'),
    (
        {"minProperties": 2, "type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
        | {"additionalProperties": False},
        '{"a":1,"b":1}',
        '{"a":1}',
    ),
    ({"minimum": -1, "type": "integer"}, "-1", "-2"),
    ({"multipleOf": 3, "type": "integer"}, "12", "13"),
    ({"pattern": "b$", "type": "string"}, '"ab"', '"ba"'),
    ({"patternProperties": {"^x": {"type": "null"}}, "type": "object"}, '{"xy":null}', '{"xy":1}'),
    ({"prefixItems": [{"type": "null"}], "items": False, "type": "array"}, "[null]", "[1]"),
    ({"properties": {"a": {"type": "null"}}, "type": "object"}, '{"a":null}', '{"a":1}'),
    ({"required": ["a"], "type": "object"}, '{"a":1}', '{"b":1}'),
    ({"type": ["null", "integer"]}, "3", "3.5"),
]


class TestKeywords:
    @pytest.mark.parametrize(("schema", "follows", "breaks"), KEYWORDS, ids=lambda value: next(iter(value)))
    def test_are_enforced(self, tiny: Any, schema: dict[str, Any], follows: str, breaks: str) -> None:
        assert tiny.reads(tiny.start(json_schema=schema), follows)
        assert not tiny.reads(tiny.start(json_schema=schema), breaks)

    def test_are_all_tried(self) -> None:
        tried = {name for schema, _, _ in KEYWORDS for name in schema}
        assert tried == json_schema._KEYWORDS - json_schema._ANNOTATIONS

    @pytest.mark.parametrize("name", sorted(json_schema._ANNOTATIONS))
    def test_that_annotate_restrict_nothing(self, tiny: Any, name: str) -> None:
        value = "https://json-schema.org/draft/2020-12/schema" if name == "$schema" else "x"
        assert tiny.reads(tiny.start(json_schema={name: value}), '{"any":["thing",1]}')
