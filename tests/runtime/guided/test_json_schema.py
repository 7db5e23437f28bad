import json
from random import Random
from typing import Any

import jsonschema
import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.guide import GrammarGuide
from llmc.runtime.guided.json_schema import check_schema, schema_text
from llmc.runtime.sampling.params import SamplingParams

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {}}, "keyword 'not' at #, which cannot be enforced; correct or remove it"),
    ({"maxLenght": 3}, "keyword 'maxLenght' at #, which cannot be enforced"),
    ({"uniqueItems": True}, "'uniqueItems'"),
    ({"nullable": True}, "'nullable'"),
    ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    ({"propertyNames": {"enum": [1]}}, "'propertyNames'"),
    ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
    ({"properties": {"not": {"if": {}}}}, "'if' at #/properties/not,"),
    ({"$defs": {"a": {"anyOf": [{}, {"then": {}}]}}}, "'then' at #/\\$defs/a/anyOf/1,"),
    ({"items": {"additionalProperties": {"else": {}}}}, "'else' at #/items/additionalProperties,"),
    ({"items": [{"contains": {}}]}, "'contains' at #/items/0,"),
    ({"properties": {"a": 3}}, "at #/properties/a a value of type int, expected an object"),
    ({"minProperties": 1}, "'minProperties'"),
    ({"minProperties": 1, "additionalProperties": False, "patternProperties": {"a": {}}}, "'minProperties'"),
    ({"pattern": "a?" * 10_000}, "pattern at # that has 20000 characters, expected at most 16384"),
    ({"patternProperties": {"a?" * 10_000: {}}}, "pattern at # that has 20000 characters"),
    ({"anyOf": [{}] * 10_000}, "more than 10000 subschemas"),
    ({"pattern": "(a{200}){100}"}, "pattern at # that repeats something 20000 times, expected at most 16384"),
    ({"multipleOf": 99999989}, "'multipleOf' at #, .* exceed 10000"),
    ({"items": {"multipleOf": 0.12345}}, "'multipleOf' at #/items, .* exceed 10000"),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "'multipleOf' at .* least common multiple"),
    ({"exclusiveMinimum": 0, "maximum": 0.25}, "'exclusiveMinimum' at #, which .* beside the bound 0.25"),
    ({"allOf": [{"minimum": -1.5}, {"exclusiveMaximum": -1}]}, "'exclusiveMaximum' at #/allOf/1, .* bound -1.5"),
    ({"exclusiveMinimum": True}, "'exclusiveMinimum' at # as True, expected a number"),
    ({"const": [{"a": 2**53 + 1}]}, "for the keyword 'const' at # an integer beyond"),
    ({"$defs": {"a": {"$id": "b", "$ref": "#/c"}}}, "'\\$ref' at #/\\$defs/a beside '\\$id'"),
]


class TestCheck:
    @pytest.mark.threat("grammar-cost")
    @pytest.mark.parametrize(("schema", "message"), REFUSED)
    def test_refuses_by_name(self, schema, message):
        with pytest.raises(GrammarError, match=message):
            check_schema(schema)

    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": {"not": {"type": "string"}, "if": True}, "required": ["not"]},
            {"enum": [{"not": 1}], "default": {"if": 1}, "examples": [{"then": 1}], "const": {"else": 1}},
            {"x-order": 3, "title": "Any", "anyOf": [{}] * 9_000},
            {"minProperties": 0},
            {"exclusiveMinimum": 0, "maximum": 1.5},
            {"properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 0.01}, "c": {"multipleOf": 1000}}},
            {"$id": "https://example.com/a", "$ref": "#/$defs/a", "$defs": {"a": {}}},
            {"minProperties": 1, "additionalProperties": False, "properties": {"a": {}}},
        ],
        ids=["names", "values", "annotations", "none", "bounds", "multiples", "root", "closed"],
    )
    def test_lets_pass_what_is_no_keyword(self, schema):
        check_schema(schema)


FORMATS = [
    ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01"]),
    (
        "time",
        ["23:59:60Z", "23:59:60.5+00:00", "00:00:59-23:59"],
        ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "00:29:61Z", "24:00:00Z"],
    ),
    (
        "date-time",
        ["1998-12-31T23:59:60Z", "2024-02-29t00:00:00.25+01:30"],
        ["1998-12-31T22:59:60Z", "2023-02-29T00:00:00Z", "1998-12-31T23:59:60-00:30"],
    ),
    (
        "hostname",
        ["a", "a-b.c", ".".join(["a" * 63] * 3) + "." + "b" * 61, "ab-c", "a--b"],
        [".".join(["a" * 63] * 3) + "." + "b" * 62, "a" * 64, "-a", "a-", "xn--a", "a..b"],
    ),
]


class TestFormats:
    @pytest.mark.parametrize(("name", "follow", "breaking"), FORMATS, ids=[name for name, _, _ in FORMATS])
    def test_are_enforced_to_the_end(self, tiny, name, follow, breaking):
        schema = {"type": "string", "format": name}
        for text in follow:
            assert tiny.reads(tiny.start(json_schema=schema), f'"{text}"'), text
        for text in breaking:
            assert not tiny.reads(tiny.start(json_schema=schema), f'"{text}"'), text

    def test_go_with_a_pattern_and_with_other_types(self, tiny):
        schema = {"format": "date", "pattern": "^2", "allOf": [{"maxLength": 10}]}
        assert tiny.reads(tiny.start(json_schema=schema), '"2024-02-29"')
        assert tiny.reads(tiny.start(json_schema=schema), "3")
        for text in ('"2023-02-29"', '"1999-01-01"'):
            assert not tiny.reads(tiny.start(json_schema=schema), text)


def test_the_number_of_listed_properties_is_enforced(tiny):
    schema = {"minProperties": 2, "type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    assert tiny.reads(tiny.start(json_schema=schema), '{"a":1,"b":1}')
    assert not tiny.reads(tiny.start(json_schema=schema), '{"a":1}')


STYLES = [
    json.dumps({"a": 1, "b": [1, {}]}),
    json.dumps({"a": 1, "b": [1, {}]}, indent=2),
    json.dumps({"a": 1, "b": [[1, 2], {"c": []}]}, indent=4),
    json.dumps({"a": 1, "b": [1]}, indent="\t").replace("\n", "\r\n"),
]
LOOSE = ['{"a":  1}', '{\n\n"a":1}', '{"a":1 \n}', '{"a":1,\n \n"b":[]}', '{"a":1}\n', ' {"a":1}', "{" + "\n" * 2 + "}"]


class TestWhiteSpace:
    @pytest.mark.parametrize("form", [{"type": "object"}, {"properties": {"a": {}, "b": {"type": "array"}}}])
    def test_is_one_space_or_one_line_end_with_its_indent(self, tiny, form):
        for text in (*STYLES, '{"a":1,"b":[1]}'):
            assert tiny.reads(tiny.start(json_schema=form), text), text
        for text in (*LOOSE, "{\n" + " " * 41 + "}"):
            assert not tiny.reads(tiny.start(json_schema=form), text), text

    def test_is_bounded_in_arguments_of_tools_too(self, tiny):
        grammar = 'start: "f(" %json {"type": "object"} ")"'
        assert tiny.reads(tiny.start(grammar=grammar), f"f({STYLES[1]})")
        assert not any(tiny.reads(tiny.start(grammar=grammar), f"f({text})") for text in LOOSE)

    def test_is_left_out_of_compact_json(self, tiny):
        for form in ({"json_schema": {}}, {"grammar": "start: %json {}"}):
            assert tiny.reads(tiny.start(**form, compact_json=True), '{"a":1,"b":[1," "]}')
            assert not any(tiny.reads(tiny.start(**form, compact_json=True), text) for text in (*STYLES, "{ }", "[1 ]"))
            assert tiny.reads(tiny.start(**form), "{ }")  # kept apart among the compiled ones


_SMALL, _LARGE = {"type": "integer", "maximum": 4}, {"type": "integer", "minimum": 3}
# Of a pattern that matches named properties alone, no further name is left after a comma.
PATTERNS: list[dict[str, Any]] = [
    {"properties": {"ab": _SMALL}, "patternProperties": {"^ab$": _LARGE}, "additionalProperties": False},
    {"properties": {"ab": _SMALL}, "patternProperties": {"^(ab|c)$": _LARGE}, "additionalProperties": False},
    {"properties": {"ab": _SMALL, "c": {}}, "patternProperties": {"^(ab|c)$": _LARGE}, "additionalProperties": False},
    {"properties": {"ab": _SMALL}, "patternProperties": {"^ab$": _LARGE}, "required": ["ab"], "maxProperties": 1},
    {"properties": {"ab": _SMALL}, "patternProperties": {"^a": _LARGE}, "additionalProperties": False},
    {
        "properties": {"ab": _SMALL, "c": {}},
        "patternProperties": {"b": _LARGE},
        "additionalProperties": {"type": "null"},
    },
    {"patternProperties": {"^ab$": _LARGE, "^c$": _SMALL}, "required": ["ab"], "additionalProperties": False},
    {"properties": {"ab": _SMALL, "c": {}}, "patternProperties": {"^ab$": False}, "additionalProperties": False},
    {"properties": {"ab": False, "c": _SMALL}, "patternProperties": {"^[ac]b?$": {}}, "additionalProperties": False},
    {"properties": {"ab": {}}, "patternProperties": {"[^\\s\\S]": {}}, "additionalProperties": False},
    {"properties": {"\n": {}, 'é"': {}}, "patternProperties": {'^(\\n|é")$': _LARGE}, "additionalProperties": False},
    {"allOf": [{"properties": {"ab": _SMALL}}, {"patternProperties": {"^ab$": _LARGE}, "additionalProperties": False}]},
    {"propertyNames": {"type": "string", "enum": ["ab", "c"]}, "additionalProperties": _LARGE, "required": ["c"]},
    {"propertyNames": {"enum": ["ab"]}, "properties": {"ab": _SMALL, "b": _LARGE}},
    {"propertyNames": {"type": "string"}, "properties": {"ab": _SMALL}, "additionalProperties": False},
    {"$ref": "#/$defs/x", "properties": {"ab": _SMALL}, "$defs": {"x": {"patternProperties": {"^ab$": _LARGE}}}},
]


class TestPatternsOfProperties:
    @pytest.mark.parametrize("schema", PATTERNS, ids=range(len(PATTERNS)))
    def test_hold_for_named_properties_and_never_end_amid_an_answer(self, tiny, schema):
        schema = {"type": "object", **schema}
        compiled, endings = tiny.shared.compile_grammar(SamplingParams(json_schema=schema)), set()
        for seed in range(8):
            guide, random, text = GrammarGuide(compiled), Random(seed), b""
            while not (allowed := tiny.allowed(guide)) & set(tiny.eos):
                # Names and further members, rather than long texts.
                likely = [t for t in allowed if (tiny.spellings[t] or b"")[:1] in (b",", b'"', b":", b"a", b"b", b"3")]
                token = random.choice(sorted(likely if likely and random.random() < 0.8 else allowed))
                guide.accept(token)
                text += tiny.spellings[token]
                if len(text) > 300:
                    break
            else:
                jsonschema.validate(json.loads(text), schema)
                endings.add(text)
        assert endings

    @pytest.mark.parametrize("patterns", [("^a", "b$"), ("", "x"), ("^[ab]$", "^[bc]$")])
    def test_that_match_the_same_name_are_refused_by_their_place(self, tiny, patterns):
        schema = {"properties": {"p": {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}}}
        with pytest.raises(
            GrammarError, match=r"'patternProperties' at #/properties/p, which cannot be enforced.* not disjoint"
        ):
            tiny.start(json_schema=schema)


class TestText:
    def test_keeps_the_order_of_properties(self):
        text = '{"properties": {"b": {}, "a": {}}}'
        assert schema_text({"properties": {"b": {}, "a": {}}}, "json_schema") == text
        assert schema_text(text, "json_schema") == text
