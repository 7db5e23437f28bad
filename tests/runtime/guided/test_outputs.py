"""Whole outputs at random logits, against re, jsonschema and a parser written for the purpose."""

import json
import re
from typing import Any

import jsonschema
import pytest

from llmc.runtime.guided import json_schema

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
    def test_match_the_regex(self, vocabulary, regex):
        assert all(re.fullmatch(regex, text) for text in vocabulary.outputs(regex=regex))

    def test_are_all_of_the_choices_and_no_other(self, vocabulary):
        assert set(vocabulary.outputs(walks=60, choice=CHOICES)) == set(CHOICES)

    @pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
    def test_are_json_of_the_schema(self, vocabulary, schema):
        validator = jsonschema.Draft202012Validator(schema)
        assert all(validator.is_valid(json.loads(text)) for text in vocabulary.outputs(json_schema=schema))

    def test_of_a_schema_and_of_its_text_are_the_same(self, tiny):
        assert list(tiny.outputs(json_schema=PERSON)) == list(tiny.outputs(json_schema=json.dumps(PERSON)))

    @pytest.mark.parametrize("grammar", [ARITHMETIC_LARK, ARITHMETIC_GBNF], ids=["lark", "gbnf"])
    def test_follow_the_grammar(self, vocabulary, grammar):
        assert all(is_arithmetic(text) for text in vocabulary.outputs(grammar=grammar))

    def test_never_spell_a_property_in_a_second_way(self, tiny):
        """A name that is escaped would escape its own rule: {"a": 1, "\\u0061": "x"} is JSON of the wrong type."""
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        guide = tiny.start(json_schema=schema)
        for token in tiny.spell(b'{"a":1,"\\'):
            guide.accept(token)
        following = {(tiny.spellings[token] or b"")[:1] for token in tiny.allowed(guide)}
        assert following == {b'"', b"\\", b"b", b"f", b"n", b"r", b"t"}


# Literals of each kind, with @ for the text of a special token, which patterns escape.
CONTROLS: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"const": "@"}}, '"@"'),
    ({"json_schema": {"enum": ["a@@ b"]}}, '"a@@ b"'),
    ({"json_schema": {"required": ["@"], "properties": {"@": {"const": 1}}, "maxProperties": 1}}, '{"@":1}'),
    ({"json_schema": {"type": "string", "pattern": "^ \\@$"}}, '" @"'),
    ({"choice": ("@", "@x@")}, "@x@"),
    ({"regex": "a \\@ "}, "a @ "),
    ({"grammar": 'start: "x" "@" "y"'}, "x@y"),
    ({"grammar": 'root ::= "x@" (root | "y")'}, "x@x@y"),
    ({"grammar": 'start: "f" %json {"const": ["@"]}'}, 'f["@"]'),
]


def fill(form: Any, control: str) -> Any:
    if isinstance(form, dict):
        return {fill(key, control): fill(value, control) for key, value in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(fill(item, control) for item in form)
    return form.replace("\\@", re.escape(control)).replace("@", control) if isinstance(form, str) else form


@pytest.mark.parametrize(("form", "text"), CONTROLS, ids=range(len(CONTROLS)))
def test_texts_of_special_tokens_are_made_of_ordinary_ones(vocabulary, form, text):
    special = (token for token, spelling in enumerate(vocabulary.spellings) if spelling is None)
    for control in {vocabulary.tokenizer.spell(token).decode() for token in special}:
        guide, tokens, rest = vocabulary.start(**fill(form, control)), [], fill(text, control).encode()
        while rest:
            tokens.append(vocabulary.longest(rest, vocabulary.allowed(guide)))
            guide.accept(tokens[-1])
            rest = rest[len(vocabulary.spellings[tokens[-1]]) :]
        assert vocabulary.allowed(guide) >= set(vocabulary.eos)
        assert vocabulary.tokenizer.decode(tokens) in (fill(text, control), fill(text, control).removeprefix(" "))


def test_the_parser_refuses_what_breaks_the_grammar():
    assert is_arithmetic("(1+22)+333")
    assert not any(is_arithmetic(text) for text in ["", "1+", "(1", "1)", "1234", "1 + 2"])


@pytest.mark.parametrize("name", sorted(json_schema.ANNOTATIONS))
def test_keywords_that_annotate_restrict_nothing(tiny, name):
    value = "https://json-schema.org/draft/2020-12/schema" if name == "$schema" else "x"
    assert tiny.reads(tiny.start(json_schema={name: value}), '{"any":["thing",1]}')
