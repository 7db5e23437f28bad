"""Calls under the grammars of their tools: random walks, read by the parser and checked by the schemas."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from doubles.hearing import merged
from doubles.refusals import about
from tokenizers import AddedToken

from llmc.errors import GrammarError, UsageError
from llmc.runtime.guided.grammars import Grammars
from llmc.runtime.guided.guide import GrammarGuide
from llmc.runtime.sampling.params import SamplingParams
from llmc.runtime.text.detokenizer import decode_all
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import FORMATS
from llmc.runtime.tools.plan import ChatPlan, plan_chat

EOS = (0, 2)
MOST_TOKENS = 400


class Vocabulary:
    """A tokenizer, with marks as special tokens or as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.grammars = Grammars(tokenizer, self.size, EOS)
        closing = {ord(character) for character in '"}]\n<)'}
        self.closing = {t for t in range(self.size) if tokenizer.spell(t)[:1] and tokenizer.spell(t)[0] in closing}

    def guide(self, plan: ChatPlan, **given: Any) -> tuple[GrammarGuide, tuple[int, ...]]:
        arguments = plan.make_sampling(self.tokenizer, given)
        compiled = self.grammars.compile_grammar(SamplingParams(grammar=arguments["grammar"]))
        assert compiled is not None
        return GrammarGuide(compiled), arguments["shown_tokens"]

    def walk(self, plan: ChatPlan, seed: int, **given: Any) -> str | None:
        """A random output that ends, None for one that does not soon."""
        guide, shown = self.guide(plan, **given)
        draw, tokens = random.Random(seed), []
        tag = self.tokenizer.encode("\n</parameter>", add_special_tokens=False)  # which nobody draws by chance
        planned: list[int] = []
        while len(tokens) < MOST_TOKENS:
            bits = np.unpackbits(guide.compute_allowed(), bitorder="little")[: self.size]
            allowed = np.flatnonzero(bits).tolist()
            planned = planned[1:] or (list(tag) if draw.random() < 0.1 else [])
            ends = [token for token in allowed if token in EOS]
            # Short outputs, for a random text has no end: quotes and brackets are more likely than others.
            closing = sorted(self.closing.intersection(allowed))
            token = draw.choice(ends or (closing if closing and draw.random() < 0.6 else allowed))
            token = planned[0] if planned and bits[planned[0]] else token
            guide.accept(token)
            if token in EOS:
                return decode_all(self.tokenizer, tokens, shown)
            tokens.append(token)
        return None

    def allows(self, plan: ChatPlan, text: str, plain: str = "", **given: Any) -> bool:
        """True if the grammar derives the whole text, and ``plain`` behind it, in which nothing is a special token."""
        tokens = [*self.tokenizer.encode(text, False), *self.tokenizer.encode_plain(plain, False)]
        return self.accepts(plan, tokens, **given)

    def accepts(self, plan: ChatPlan, tokens: Sequence[int], **given: Any) -> bool:
        guide, _ = self.guide(plan, **given)
        try:
            for token in [*tokens, EOS[0]]:
                guide.accept(token)
        except GrammarError:
            return False
        return True


@pytest.fixture(scope="module", params=["text", "special"])
def vocabulary(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    if request.param == "special":
        marks = {
            mark for form in FORMATS.values() for mark in (*form.marks, *form.frame) if mark and mark.count("|>") < 2
        }
        backend = tokenizer._backend
        backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in sorted(marks)])
        tokenizer = Tokenizer(backend, tokenizer.special_tokens)
    return Vocabulary(tokenizer)


def plan_of(form: str, tools: Sequence[Any], choice: str = "required", parallel: bool = True) -> ChatPlan:
    return plan_chat("", "", read_tools(tools), choice, parallel=parallel, tool_format=form, reasoning_budget=None)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 3, "maximum": 12},
        "open": {"type": "boolean", "description": "a"},
        "kind": {"type": "string", "enum": ["door", "gate"]},
    },
    "required": ["open"],
    "additionalProperties": False,
}
PLAIN = {**SCHEMA, "properties": {**SCHEMA["properties"], "size": {"type": "integer"}}}
FEW = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


def few(form: str) -> list[dict[str, Any]]:
    schema = PLAIN if "gemma" in form else SCHEMA
    return [{"type": "function", "function": {"name": "look", "parameters": schema}}, {"function": {"name": "now"}}]


@pytest.mark.threat("tool-calls")
@pytest.mark.parametrize("form", FORMATS)
def test_required_calls_hold_to_the_schema(form, vocabulary, hear):
    plan, heard = plan_of(form, few(form)), 0
    for seed in range(3):
        text = vocabulary.walk(plan, seed)
        if text is None:
            continue
        content, _, calls = hear(text, form, tools=few(form))
        assert content == "" and calls, text
        for name, arguments in calls:
            schema = {"look": PLAIN if "gemma" in form else SCHEMA, "now": {"maxProperties": 0}}[name]
            jsonschema.validate(json.loads(arguments), schema)
        heard += len(calls)
    assert heard


@pytest.mark.parametrize("form", FORMATS)
def test_a_named_tool_is_the_only_one_and_called_once(form, vocabulary, hear):
    text = vocabulary.walk(plan_of(form, few(form), "now", parallel=False), 0)
    assert text is not None
    content, _, calls = hear(text, form)
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in calls] == [("now", {})]


@pytest.mark.threat("tool-calls")
@pytest.mark.parametrize("form", FORMATS)
def test_what_follows_an_opening_mark_is_guided_and_what_precedes_it_is_free(form, vocabulary):
    plan = plan_of(form, few(form), "auto")
    once = plan_of(form, few(form), "auto", parallel=False)
    unmarked = '{"name": "now", "arguments": {}}'
    free = ["", "Some é text\n{", "{}", '{"nam": 1}', "[1] <tool", "call", f"```json\n{unmarked}\n```", f"[{unmarked}]"]
    assert all(vocabulary.allows(plan, text) for text in free)
    call = ONE[form]
    several = call if form in ("llama3", "harmony") else TWO[form]
    assert vocabulary.allows(plan, call) and vocabulary.allows(once, call)
    assert vocabulary.allows(plan, several) and (several == call or not vocabulary.allows(once, several))
    assert not vocabulary.allows(plan, call.replace("now", "never"))
    assert not vocabulary.allows(plan_of(form, few(form)), "Some text")
    if not FORMATS[form].bare_starts:
        assert vocabulary.allows(plan, f"Some text{call}")


ONE = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "llama3": '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]now[ARGS]{}",
    "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "hunyuan": '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
    "phi4_mini": '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>',
    "functools": 'functools[{"name": "now", "arguments": {}}]',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "olmo3": "<function_calls>\nnow()\n</function_calls>",
    "functiongemma": "<start_function_call>call:now{}<end_function_call>",
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "pythonic": "[now()]",
}
_LISTED = {
    form: ONE[form][ONE[form].index("[{") + 1 : ONE[form].index("}]") + 1]
    for form in ("mistral", "granite", "hunyuan", "phi4_mini", "functools", "cohere")
}
TWO = {
    **{form: f"{ONE[form]}\n{ONE[form]}" for form in ("hermes", "qwen3_coder", "seed_oss")},
    **{form: ONE[form] * 2 for form in ("mistral_args", "functiongemma", "gemma4")},
    **{form: ONE[form].replace(call, f"{call}, {call}") for form, call in _LISTED.items()},
    "olmo3": "<function_calls>\nnow()\nnow()\n</function_calls>",
    "pythonic": "[now(), now()]",
}


@pytest.mark.parametrize("vocabulary", ["special"], indirect=True)
def test_texts_and_json_stand_behind_harmonys_header(vocabulary):
    plan, header = plan_of("harmony", FEW, "auto"), FORMATS["harmony"].frame[0]
    assert vocabulary.allows(plan, f"{header}Some text")
    assert vocabulary.allows(plan, f'{header}{{"open": true}}', json_schema=SCHEMA)
    assert not vocabulary.allows(plan, f"{header}Some text", json_schema=SCHEMA)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["look", "<tool_call>"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
# Forms of an answer, with texts that follow them and one that does not.
SHAPED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"json_schema": PERSON}, ['{"name": "look", "age": 3}', '{\n  "name": "<tool_call>", "age": 1\n}'], "text"),
    ({"regex": "a[/b]+<tool_call>"}, ["a/b<tool_call>"], "b"),
    ({"choice": ("yes", "{no}", "a ::= b")}, ["yes", "{no}", "a ::= b"], "no"),
    ({"grammar": 'root ::= "a" x\nx ::= "b" | "(" x ")"'}, ["a((b))"], "b"),
    ({"grammar": 'start: "a" x\nx: "b" | "(" x ")"'}, ["a((b))"], "b"),
]


def look_call(form: str, arguments: dict[str, Any]) -> str:
    return FORMATS[form].write([("look", arguments)])


# Every format beside a schema, and every form of an answer beside a format of each kind: with tags around JSON or XML,
# without marks, of Python, with a header, with quotes of its own.
BESIDE = [(form, *SHAPED[0]) for form in FORMATS]
BESIDE += [
    (form, *shaped)
    for form in ("hermes", "qwen3_coder", "llama3", "pythonic", "harmony", "gemma4")
    for shaped in SHAPED[1:]
]


@pytest.mark.parametrize(
    ("form", "given", "texts", "other"), BESIDE, ids=[f"{form}-{next(iter(given))}" for form, given, _, _ in BESIDE]
)
def test_an_answer_is_calls_or_has_the_form(given, texts, other, form, vocabulary):
    plan, frame = plan_of(form, [{"function": {"name": "look", "parameters": PLAIN}}], "auto"), ""
    if vocabulary.tokenizer.token_to_id("<tool_call>") is not None:
        frame = FORMATS[form].frame[0]
    call = look_call(form, {"open": True}).removesuffix("<|call|>")
    for begin, text in ((call, ""), *((frame, text) for text in texts)):
        assert vocabulary.allows(plan, begin, text, **given), text
        parser = plan.parser(str, shaped=True)
        content, _, calls = merged([*map(parser.push, begin + text), parser.finish()])
        named = [(name, json.loads(arguments)) for name, arguments in calls]
        assert named == ([] if text else [("look", {"open": True})])
        assert content.removeprefix(frame) == text  # the tokens of a frame are not shown
    assert not vocabulary.allows(plan, frame, other, **given)
    assert not vocabulary.allows(plan, look_call(form, {"open": 3}), **given)


@pytest.mark.parametrize("form", ["hermes", "llama3", "pythonic"])
@pytest.mark.parametrize("choice", ["required", "look"])
def test_a_form_binds_nothing_where_the_answer_is_a_call(form, choice, vocabulary):
    plan, given = plan_of(form, FEW, choice), {"json_schema": SCHEMA}
    assert plan.make_sampling(vocabulary.tokenizer, given).keys().isdisjoint(given)
    assert vocabulary.allows(plan, look_call(form, {"open": True}), **given)
    assert not vocabulary.allows(plan, '{"open": true}', **given)


def test_references_in_a_tools_schema_hold_beside_a_form(vocabulary):
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#"}}, "$defs": {"n": {"type": "null"}}}
    plan = plan_of("llama3", [{"function": {"name": "look", "parameters": schema}}], "auto")
    call = look_call("llama3", {"a": None, "b": {"a": None}})
    assert vocabulary.allows(plan, call, json_schema=PERSON)
    assert not vocabulary.allows(plan, call.replace('{"a": null}}', '{"a": 1}}'), json_schema=PERSON)


@pytest.mark.parametrize(
    ("form", "given", "reason"),
    [
        ("hermes", {"regex": ".*"}, "regex is given beside tools, and an answer .* may begin like a call"),
        ("hermes", {"choice": ("a", "<tool_call>")}, "choice is given beside tools"),
        ("llama3", {"json_schema": {}}, "json_schema is given beside tools"),
        ("llama3", {"grammar": 'root ::= "{" root? "}"'}, "grammar is given beside tools"),
        ("pythonic", {"json_schema": {"type": "array"}}, "json_schema is given beside tools"),
        ("hermes", {"grammar": 'start: "a" B\n%ignore / /\nB: "b"'}, "grammar has directives"),
        ("hermes", {"grammar": 'start: "a" call\ncall: "b"'}, "a name that the grammar of calls"),
        ("hermes", {"detokenize": False}, "detokenize is False, but calls are read from text"),
    ],
)
def test_forms_that_are_not_told_apart_from_calls_are_refused(form, given, reason, vocabulary):
    with pytest.raises(UsageError, match=reason):
        plan_of(form, FEW, "auto").make_sampling(vocabulary.tokenizer, given)


_BAD = {"type": "object", "properties": {"q": {"type": "string", "pattern": r"\bx", "maxLength": 3}}}
TOOLS = [*FEW, {"function": {"name": "find", "parameters": _BAD}}, {"name": "flat", "parameters": _BAD}]


@pytest.mark.parametrize("form", ["hermes", "llama3", "harmony"])
def test_only_the_tool_that_cannot_be_enforced_is_loosened_and_only_by_that(form):
    plan = plan_of(form, TOOLS, "auto")
    looser, places = next(plan.loosen_plans(GrammarError("grammar", "x"), {}, allowed=True))
    assert places == [f"tools[{place}.properties.q.pattern" for place in ("1].function.parameters", "2].parameters")]
    assert looser.tools[0] == plan.tools[0]
    assert looser.tools[1].schema["properties"] == {"q": {"type": "string", "maxLength": 3}}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"properties": {"a:b": {"type": "null"}, "c": {}}, "required": ["a:b", "c"]}, {"c"}),
        ({"properties": {"": {}, "a b": {}}, "required": [["a b"]]}, set()),
        ({"type": None, "properties": None}, set()),
        ({"properties": {"a": {"type": "array", "items": [{"type": "null"}]}}}, {"a"}),
        ({"properties": {"a": {"type": "any"}}, "required": ["a", "b"]}, {"a"}),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, {"a"}),
    ],
)
def test_no_schema_of_a_tool_that_need_not_be_called_refuses_a_request(form, parameters, kept):
    plan = plan_of(form, [{"name": "x", "parameters": parameters}], "auto")
    looser, _ = next(plan.loosen_plans(GrammarError("grammar", "x"), {}, allowed=True))
    assert kept <= (looser.tools[0].schema["properties"] or {}).keys()


@pytest.mark.parametrize("form", FORMATS)
def test_what_restricts_nothing_loosens_nothing(form):
    noise = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "x-order": 1, "required": None}
    own = {"type": "string", "x-a": {}, "contentEncoding": "base64", "title": "A", "default": None, "anyOf": None}
    plan = plan_of(form, [{"name": "x", "parameters": {**noise, "properties": {"a": own}}}], "auto")
    assert next(plan.loosen_plans(GrammarError("grammar", "x"), {}, allowed=True)) == (plan, [])


@pytest.mark.parametrize(
    ("choice", "allowed", "given", "reason"),
    [
        ("required", True, {}, r"^tools\[1\]\.function\.parameters cannot be enforced: .*"),
        ("auto", False, {}, r"^tools\[1\]\.function\.parameters cannot be enforced: .*"),
        ("auto", True, {"json_schema": {"not": {}}}, "^json_schema has the keyword 'not' at #, which"),
        ("auto", True, {"regex": "(?=a)"}, "^regex cannot be "),
    ],
)
def test_what_cannot_be_enforced_is_named_by_the_parameter_that_holds_it(choice, allowed, given, reason):
    plan = plan_of("hermes", TOOLS, choice)
    with pytest.raises(GrammarError, match=reason):
        next(plan.loosen_plans(GrammarError("grammar", "x"), given, allowed=allowed))


def test_tools_that_are_too_much_together_keep_the_names_of_their_parameters():
    *_, (looser, places) = _all_plans(plan_of("hermes", few("hermes"), "auto"))
    assert places == ["tools[0].function.parameters"]
    assert looser.tools[0].schema == {
        "type": "object", "properties": {"size": {}, "open": {}, "kind": {}}, "required": ["open"]
    }  # fmt: skip


def _all_plans(plan: ChatPlan) -> list[tuple[ChatPlan, list[str]]]:
    found: list[tuple[ChatPlan, list[str]]] = []
    with pytest.raises(GrammarError, match=r"^tools need a grammar of calls that has 70000 characters"):
        found.extend(plan.loosen_plans(GrammarError("grammar", "has 70000 characters"), {}, allowed=True))
    return found


@pytest.mark.threat("tool-schemas")
@pytest.mark.parametrize(
    ("form", "schema", "reason"),
    [
        ("hermes", {"properties": {"a": {"not": {}}}}, "'not' at #/properties/a, which cannot be enforced"),
        (
            "qwen3_coder",
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            "in x the parameter a, a text with rules",
        ),
        ("qwen3_coder", {"properties": {"a": {"enum": ["1", 2]}}}, "in x the parameter a, a text with rules"),
        ("qwen3_coder", {"properties": {"a": {"anyOf": [{"type": "string"}, {"minimum": 1}]}}}, "a text with rules"),
        (
            "seed_oss",
            {"properties": {"a>b": {"type": "integer"}}},
            "the parameter 'a>b', which .* cannot write without quotes",
        ),
        (
            "functiongemma",
            {"properties": {"a:b": {"type": "integer"}}},
            "the parameter 'a:b', which .* cannot write without quotes",
        ),
        ("qwen3_coder", {"anyOf": [{}]}, "has 'anyOf' beside the properties of x"),
        ("pythonic", {"required": ["a"]}, "requires in x 'a', which is not one of its properties"),
        ("functiongemma", {"properties": {"a": {"type": "integer", "minimum": 1}}}, "has in a of x 'minimum'"),
        ("functiongemma", {"properties": {"a": False}}, "holds a of x, which allows no value"),
        ("gemma4", {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "in a of x 'oneOf'"),
        (
            "gemma4",
            {"properties": {"a": {"type": "string", "anyOf": [{"type": "integer"}]}}},
            "has in a of x 'type', which",
        ),
        ("gemma4", {"properties": {"a": {"allOf": [{"type": "string"}, {}]}}}, "has in a of x 'allOf'"),
        ("gemma4", {"properties": {"a": {"not": {}, "type": "string"}}}, "has in a of x 'not'"),
        ("gemma4", {"properties": {"a": {"type": "array", "items": [{}]}}}, "has in a of x 'items'"),
        ("gemma4", {"properties": {"a": {"type": ["string", "null"], "pattern": "a"}}}, "has in a of x 'pattern'"),
        ("gemma4", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "in a of x to '#/.defs/b', which .* not define"),
        ("gemma4", {"properties": {"a": {"enum": [[1]]}}}, "has in a of x no choice that the model's format"),
        ("gemma4", {"required": ["a"]}, "requires in x 'a', which is not one of its properties"),
        ("gemma4", {"properties": 3}, "holds properties 3 in x, expected a JSON schema"),
        ("qwen3_coder", {"properties": {"a": {"anyOf": 1}}}, "holds anyOf 1 in x"),
        ("olmo3", {"properties": {"a": 1}}, "holds parameters 1 in x"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(form, schema, reason, vocabulary):
    with pytest.raises(GrammarError, match=reason):
        vocabulary.guide(plan_of(form, [{"function": {"name": "x", "parameters": schema}}]))


TEXTS = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {"$ref": "#/$defs/n"},
        "d": {"type": "array", "items": {"type": "boolean"}},
        "e": {"enum": ["x", 1, ""]},
        "f": {"$ref": "#/$defs/colour"},
        "g": {"type": ["string", "integer"]},
    },
    "required": ["b"],
    "$defs": {"n": {"type": "number"}, "colour": {"type": "string", "enum": ["red", "::= %json"]}},
}


@pytest.mark.parametrize("form", ["qwen3_coder", "seed_oss", "pythonic", "olmo3", "functiongemma", "gemma4"])
def test_parameters_of_every_type_come_back_as_they_were_meant(form, vocabulary):
    tools = [{"function": {"name": "get_weather", "parameters": TEXTS}}]
    plan, (tool,) = plan_of(form, tools, parallel=False), read_tools(tools)
    texts = [text for seed in range(4) if (text := vocabulary.walk(plan, seed)) is not None]
    assert texts
    for text in texts:
        parser = plan.parser(str)
        _, _, ((name, arguments),) = merged([parser.push(text), parser.finish()])
        jsonschema.validate(json.loads(arguments), tool.schema)
        assert name == "get_weather"


UNTYPED: dict[str, Any] = {
    "properties": {
        "any": {},
        "null": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "list": {"type": ["integer", "null"]},
        "one": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"const": 1}]},
        "types": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "boolean"}}]},
        "enum": {"enum": [1, "1", None, True, 2.5]},
        "const": {"const": "x"},
        "free": {"type": "object"},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "items": {"type": "array"},
        "all": {"allOf": [{"$ref": "#/$defs/tree"}], "description": "d"},
        "tree": {"$ref": "#/$defs/tree"},
        "fields": {"properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["leaf"],
        }
    },
}
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "any": (["a", 1, None, True, [1, "b", []], {"c": {"d": 1.5}}, {}], []),
    "null": (["a", "", None], [1, True, []]),
    "list": ([3, None], ["3", 1.5]),
    "one": (["a", "b", 1], ["c", "1", None]),
    "types": (["a", [True], []], [True, [1], 1]),
    "enum": ([1, "1", None, True, 2.5], [2, "x", False]),
    "const": (["x"], ["y", ""]),
    "free": ([{}, {"a": 1, "b": {"c": "d"}}], ["a", []]),
    "map": ([{}, {"a": 1}], [{"a": "1"}]),
    "items": ([[], [1, "a", None]], [{}]),
    "all": ([{"leaf": True}], [{}, "a"]),
    "tree": ([{"leaf": True}, {"leaf": False, "next": {"leaf": True}}], [{}, {"next": {"leaf": True}}]),
    "fields": ([{"x": 1}], [{}, {"x": "1"}]),
}


@pytest.mark.parametrize("form", ["functiongemma", "gemma4"])
def test_an_error_about_a_schema_that_gemmas_calls_cannot_hold_to_names_the_tools(form, vocabulary):
    schema = {"properties": {"a": {"type": "integer", "minimum": 1}}}
    with pytest.raises(GrammarError, match="cannot enforce; leave it out", check=about("tools")):
        vocabulary.guide(plan_of(form, [{"function": {"name": "x", "parameters": schema}}]))


@pytest.mark.parametrize("form", ["functiongemma", "gemma4"])
@pytest.mark.parametrize("name", VALUES)
def test_gemmas_calls_hold_to_schemas_that_name_no_plain_type(form, name, vocabulary, hear):
    parameters = {**UNTYPED, "properties": {name: UNTYPED["properties"][name]}}
    tools = [{"function": {"name": "x", "parameters": parameters}}]
    plan, (tool,) = plan_of(form, tools), read_tools(tools)
    for allowed, values in zip((True, False), VALUES[name], strict=True):
        for value in values:
            text = FORMATS[form].write([("x", {name: value})])
            assert vocabulary.allows(plan, text) is allowed, text
            assert not allowed or json.loads(hear(text, form)[2][0][1]) == {name: value}
    whole = [{"function": {"name": "x", "parameters": UNTYPED}}]
    text = vocabulary.walk(plan_of(form, tools, parallel=False), 1)
    if text is not None:
        jsonschema.validate(json.loads(hear(text, form)[2][0][1]), tool.schema)
    assert vocabulary.allows(plan_of(form, whole), FORMATS[form].write([("x", {})]))


@pytest.mark.parametrize("form", FORMATS)
def test_a_text_may_hold_every_mark_but_one_that_would_end_it(form, vocabulary, unwritable):
    """Marks in a text are spelled by ordinary tokens."""
    tools = [{"function": {"name": "x", "parameters": {"properties": {"text": {"type": "string"}}}}}]
    plan, encode = plan_of(form, tools), vocabulary.tokenizer.encode
    before, after = FORMATS[form].write([("x", {"text": "PLACE"})]).removesuffix("<|call|>").split("PLACE")
    ending = unwritable.get(form)
    for text in filter(None, (*FORMATS[form].marks, *FORMATS[form].begins, ending, "<", "\nx\n", "é")):
        spelled = text if ending else json.dumps(text, ensure_ascii=False)[1:-1]
        middle = vocabulary.tokenizer.encode_plain(f"a{spelled}b", False)
        allowed = vocabulary.accepts(plan, [*encode(before, False), *middle, *encode(after, False)])
        assert allowed is (text != ending), text
