"""Calls under the grammars of their tools: random walks, read by the parser and checked by the schemas."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from doubles.hearing import merged
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

    def allows(self, plan: ChatPlan, text: str, **given: Any) -> bool:
        """True if the grammar derives the whole text."""
        guide, _ = self.guide(plan, **given)
        try:
            for token in [*self.tokenizer.encode(text, add_special_tokens=False), EOS[0]]:
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


@pytest.mark.parametrize("form", FORMATS)
def test_required_calls_hold_to_the_schema(form: str, vocabulary: Vocabulary, hear: Callable[..., Any]):
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
def test_a_named_tool_is_the_only_one_and_called_once(form: str, vocabulary: Vocabulary, hear: Callable[..., Any]):
    text = vocabulary.walk(plan_of(form, few(form), "now", parallel=False), 0)
    assert text is not None
    content, _, calls = hear(text, form)
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in calls] == [("now", {})]


@pytest.mark.parametrize("form", FORMATS)
def test_what_follows_an_opening_mark_is_guided_and_what_precedes_it_is_free(form: str, vocabulary: Vocabulary):
    plan = plan_of(form, few(form), "auto")
    once = plan_of(form, few(form), "auto", parallel=False)
    free = ["", "Some é text\n{", "{}", '{"nam": 1}', "[1] <tool", "call"]
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
def test_texts_and_json_stand_behind_harmonys_header(vocabulary: Vocabulary):
    plan, header = plan_of("harmony", FEW, "auto"), FORMATS["harmony"].frame[0]
    assert vocabulary.allows(plan, f"{header}Some text")
    assert vocabulary.allows(plan, f'{header}{{"open": true}}', json_schema=SCHEMA)
    assert not vocabulary.allows(plan, f"{header}Some text", json_schema=SCHEMA)


def test_an_answer_may_be_json_or_calls(vocabulary: Vocabulary):
    plan, form = plan_of("hermes", FEW, "auto"), {"json_schema": SCHEMA}
    assert vocabulary.allows(plan, '{"open": true}', **form)
    assert vocabulary.allows(plan, ONE["hermes"].replace("now", "look").replace("{}", '{"open": true}'), **form)
    assert not vocabulary.allows(plan, "text", **form)


@pytest.mark.parametrize(
    ("form", "choice", "given", "reason"),
    [
        (
            "hermes",
            "required",
            {"json_schema": SCHEMA},
            "json_schema is the form of an answer, but tool_choice wants calls",
        ),
        ("hermes", "auto", {"regex": "a"}, "regex and tools cannot be combined"),
        ("llama3", "auto", {"json_schema": SCHEMA}, "json_schema and tools cannot be combined"),
        ("hermes", "auto", {"detokenize": False}, "detokenize is False, but calls are read from text"),
    ],
)
def test_forms_that_do_not_go_with_calls_are_refused(
    form: str, choice: str, given: dict[str, Any], reason: str, vocabulary: Vocabulary
):
    with pytest.raises(UsageError, match=reason):
        plan_of(form, FEW, choice).make_sampling(vocabulary.tokenizer, given)


@pytest.mark.parametrize(
    ("form", "schema", "reason"),
    [
        ("hermes", {"properties": {"a": {"not": {}}}}, "'not' at #/properties/a cannot be enforced"),
        (
            "qwen3_coder",
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            "the parameter a of the tool x is a text under rules",
        ),
        (
            "qwen3_coder",
            {"properties": {"a": {"enum": ["1", 2]}}},
            "the parameter a of the tool x is a text under rules",
        ),
        (
            "qwen3_coder",
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"minimum": 1}]}}},
            "is a text under rules",
        ),
        ("seed_oss", {"properties": {"a>b": {"type": "integer"}}}, "the parameter 'a>b', expected letters"),
        ("functiongemma", {"properties": {"a:b": {"type": "integer"}}}, "the parameter 'a:b', expected letters"),
        ("qwen3_coder", {"anyOf": [{}]}, "the parameters of the tool x have 'anyOf' beside their properties"),
        ("pythonic", {"required": ["a"]}, "the tool x requires 'a', which is none of its properties"),
        ("functiongemma", {"properties": {"a": {"type": "integer", "minimum": 1}}}, "a of x has 'minimum'"),
        ("functiongemma", {"properties": {"a": {}}}, "a of x has no type"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(form: str, schema: Any, reason: str, vocabulary: Vocabulary):
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


@pytest.mark.parametrize("form", ["qwen3_coder", "seed_oss", "pythonic", "olmo3"])
def test_parameters_of_every_type_come_back_as_they_were_meant(form: str, vocabulary: Vocabulary):
    tools = [{"function": {"name": "get_weather", "parameters": TEXTS}}]
    plan, (tool,) = plan_of(form, tools, parallel=False), read_tools(tools)
    texts = [text for seed in range(4) if (text := vocabulary.walk(plan, seed)) is not None]
    assert texts
    for text in texts:
        parser = plan.parser(str)
        _, _, ((name, arguments),) = merged([parser.push(text), parser.finish()])
        jsonschema.validate(json.loads(arguments), tool.schema)
        assert name == "get_weather"
