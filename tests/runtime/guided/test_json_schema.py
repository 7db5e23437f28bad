from typing import Any

import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.json_schema import check_schema, schema_text

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"not": {}}, "keyword 'not' at # cannot be enforced; remove it"),
    ({"maxLenght": 3}, "keyword 'maxLenght' at # cannot be enforced; did you mean maxLength"),
    ({"uniqueItems": True}, "'uniqueItems'"),
    ({"nullable": True}, "'nullable'"),
    ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
    ({"properties": {"not": {"if": {}}}}, "'if' at #/properties/not "),
    ({"$defs": {"a": {"anyOf": [{}, {"then": {}}]}}}, "'then' at #/\\$defs/a/anyOf/1 "),
    ({"items": {"additionalProperties": {"else": {}}}}, "'else' at #/items/additionalProperties "),
    ({"items": [{"contains": {}}]}, "'contains' at #/items/0 "),
    ({"properties": {"a": 3}}, "#/properties/a is of type int, expected an object"),
    ({"minProperties": 1}, "'minProperties'"),
    ({"minProperties": 1, "additionalProperties": False, "patternProperties": {"a": {}}}, "'minProperties'"),
    ({"pattern": "a?" * 10_000}, "pattern at # has 20000 characters, expected at most 16384"),
    ({"patternProperties": {"a?" * 10_000: {}}}, "pattern at # has 20000 characters"),
    ({"anyOf": [{}] * 10_000}, "more than 10000 subschemas"),
]


class TestCheck:
    @pytest.mark.parametrize(("schema", "message"), REFUSED)
    def test_refuses_by_name(self, schema: dict[str, Any], message: str) -> None:
        with pytest.raises(GrammarError, match=message):
            check_schema(schema)

    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": {"not": {"type": "string"}, "if": True}, "required": ["not"]},
            {"enum": [{"not": 1}], "default": {"if": 1}, "examples": [{"then": 1}], "const": {"else": 1}},
            {"x-order": 3, "title": "Any", "anyOf": [{}] * 9_000},
            {"minProperties": 0},
            {"minProperties": 1, "additionalProperties": False, "properties": {"a": {}}},
        ],
        ids=["names", "values", "annotations", "any", "closed"],
    )
    def test_lets_pass_what_is_no_keyword(self, schema: dict[str, Any]) -> None:
        check_schema(schema)


class TestText:
    def test_keeps_the_order_of_properties(self) -> None:
        text = '{"properties": {"b": {}, "a": {}}}'
        assert schema_text({"properties": {"b": {}, "a": {}}}, "json_schema") == text
        assert schema_text(text, "json_schema") == text
