"""Outputs told apart, whatever the pieces in which they come."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.tools.formats import FORMATS
from llmc.runtime.tools.parser import ChatParser, Parsed
from llmc.runtime.tools.thinking import MARKS as THINKING_MARKS
from llmc.runtime.tools.thinking import ThinkingMarks
from llmc.runtime.tools.xml_calls import types_of

NOW = '{"name": "now", "arguments": {}}'
PARIS = '{"city": "Paris", "days": 3}'
# Two calls as the families write them, after a word of content where the format allows one.
SPOKEN = {
    "hermes": f'ok\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3"
    "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "ok\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "llama3": f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'ok[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "a"}}, {NOW}]',
    "mistral_args": f"ok[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}",
    "granite": f'ok<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {NOW}]',
    "hunyuan": f'ok\n<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}, {NOW}]</tool_calls>',
    "phi4_mini": f'ok<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now"}}]<|/tool_call|>',
    "functools": f'ok functools[{{"name": "get_weather", "arguments": {PARIS}}}, {{"arguments": {{}}, "name": "now"}}]',
    "cohere": 'ok<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f'{PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
    "olmo3": "ok\n<function_calls>\nget_weather(city='Paris', days=3)\nnow()\n</function_calls>",
    "functiongemma": "ok<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma4": 'ok<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "harmony": f"ok<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
    "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "pythonic": '[get_weather(city="Paris", days=3), now()]',
}
OTHERS = {
    "llama3": [
        '<|python_tag|>{"name": "now", "parameters": {}}',
        '{"type": "function", "name": "now", "parameters": {}}',
    ],
    "mistral_args": ['[TOOL_CALLS] [{"name": "now", "arguments": {}}]', '[TOOL_CALLS]{"name": "now", "arguments": {}}'],
    "phi4_mini": ['<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>'],
    "hermes": [
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": null}',
    ],
    "granite": ['<tool_call>[{"name": "now", "arguments": {}}]'],
    "olmo3": ["<function_calls>now()</function_calls>"],
    "harmony": [
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.now code<|message|><|call|>",
    ],
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form, hear):
    content, reasoning, calls = hear(SPOKEN[form], form)
    assert content == ("" if FORMATS[form].bare_starts else "ok") and reasoning == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", {"city": "Paris", "days": 3}),
        ("now", {}),
    ]


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in OTHERS.items() for text in texts])
def test_other_spellings_of_a_format_are_read(form, text, hear):
    assert hear(text, form) == ("", "", [("now", "{}")])


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'São "P"', "days": 3}),
    ("now", {"a": [1, {"b": None}], "c": True}),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("calls", [CALLS[:1], CALLS])
def test_what_a_format_writes_it_reads(form, calls, hear):
    content, _, heard = hear(FORMATS[form].write(calls), form)
    assert (content, [(name, json.loads(arguments)) for name, arguments in heard]) == ("", calls)


HOSTILE = [
    *("'", '"', "\\", "`", "\n", "\r\n", "\t", " ", "", "é", "日本", "\u2028", "\U0001f600", "\\n", '\\"', "\\\\"),
    *("True", "null", "1", "{", "}}", "[", "]}", "(", ")", ", b=1", "\nx\n", "a:b,c", "<", "```json\n"),
    *("</parameter>", "</function>", "<parameter=b>", "call:x{"),
]
ANY_TEXT = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "deep": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}},
    },
}


@pytest.mark.parametrize("form", FORMATS)
def test_texts_with_any_formats_marks_come_back(form, hear, unwritable):
    write, tools = FORMATS[form].write, [{"function": {"name": "x", "parameters": ANY_TEXT}}]
    marks = {mark for each in FORMATS.values() for mark in (*each.marks, *each.begins)}
    for mark in {*HOSTILE, *marks, write([("x", {})])} - {unwritable.get(form)}:
        for text in (mark, f"a{mark}b"):
            call = ("x", {"text": text, "deep": {"a": [text, "z"]}})
            content, _, heard = hear(write([call]), form, tools=tools)
            assert (content, [(name, json.loads(given)) for name, given in heard]) == ("", [call]), text
        assert hear(list(write([call])), form, tools=tools) == (content, "", heard)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
LOOK = "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        (f"{ANALYSIS}Well.\nWell.<|end|>{FINAL}Text.\n", ("Text.\n", "Well.\nWell.", [])),
        (f"{ANALYSIS}Well.<|end|>{FINAL}Text.<|return|>", ("Text.", "Well.", [])),
        ("<|channel|>final<|message|>Text, 1 < 2 to=functions.now.", ("Text, 1 < 2 to=functions.now.", "", [])),
        (f"{ANALYSIS}Well.<|end|>{LOOK}<|call|>", ("", "Well.", [("now", "{}")])),
        (f"{ANALYSIS}We<|end|><|channel|>commentary<|message|>Look:<|end|>{LOOK}", ("Look:", "We", [("now", "{}")])),
        (f"{ANALYSIS}We<|end|><|start|>assistant{ANALYSIS}ll.<|end|>{FINAL}Text.", ("Text.", "Well.", [])),
        (f"<|channel|>analysis to=python code<|message|>1+1<|call|>{FINAL}2", ("2", "1+1", [])),
        ("Text.", ("Text.", "", [])),
    ],
)
def test_messages_are_told_apart_by_their_headers_character_by_character(text, heard, hear):
    marks = next(marks for marks in THINKING_MARKS if marks.form == "harmony")
    assert hear(text, "harmony", marks=marks) == hear(list(text), "harmony", marks=marks) == heard


MARKS = [
    "```json\n",
    "```",
    f"{NOW}",
    "<think>",
    "</think>",
    "\n",
    " ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "now",
    "(",
    ")",
    "=",
    "'",
    "1",
    "é",
]
SCRAPS = [*MARKS, *(text[at : at + 9] for text in SPOKEN.values() for at in range(0, len(text), 9))]


@pytest.mark.threat("tool-calls")
@given(
    st.sampled_from(list(FORMATS)),
    st.booleans(),
    st.lists(st.sampled_from([*SCRAPS, *SPOKEN.values()]), max_size=8),
    st.data(),
)
def test_pieces_change_nothing(hear, form, thinking, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    given = {"form": form, "thinking": thinking, "whole": data.draw(st.booleans()), "cut": data.draw(st.booleans())}
    assert hear(pieces, **given) == hear(text, **given) == hear(list(text), **given)


@pytest.mark.parametrize("form", FORMATS)
def test_every_cut_of_a_call_is_read_without_an_error(form, hear):
    for end in range(len(SPOKEN[form])):
        content, _, calls = hear(SPOKEN[form][:end], form)
        assert len(calls) <= 2 and all(name in ("get_weather", "now") for name, _ in calls)
        whole = [arguments for _, arguments in calls[:-1]]
        assert all(json.loads(arguments) == {"city": "Paris", "days": 3} for arguments in whole)
        assert content or calls or not SPOKEN[form][:end]


@pytest.mark.parametrize("form", FORMATS)
def test_of_a_call_that_the_length_cut_off_no_markup_is_content(form, hear):
    for end in range(2, len(SPOKEN[form])):
        content, _, calls = hear(SPOKEN[form][:end], form, cut=True)
        # The first character of a mark may be any text's.
        assert len(content.removeprefix("ok").strip()) <= 1, SPOKEN[form][:end]
        assert {name for name, _ in calls} <= {"get_weather", "now"}


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_something_else_than_the_length_ended_is_content(form, hear):
    for end in range(len(SPOKEN[form])):
        text = SPOKEN[form][:end]
        content, _, calls = heard = hear(text, form, whole=True)
        assert end % 5 or heard == hear(list(text), form, whole=True)
        assert [(name, json.loads(given)) for name, given in calls] == [
            ("get_weather", {"city": "Paris", "days": 3}),
            ("now", {}),
        ][: len(calls)]
        assert text.rstrip().endswith(content.rstrip().removeprefix("ok")) and (calls or content == text)
        cut = hear(text, form, cut=True, whole=True)
        assert cut == hear(text, form, cut=True)


@pytest.mark.parametrize("text", ['{"total": {"a": [1, 2', "a < b", "<tool_call> no call", "[1, 2"])
@pytest.mark.parametrize("form", ["hermes", "llama3", "pythonic"])
def test_any_other_text_that_the_length_cut_off_is_whole(form, text, hear):
    assert hear(text, form, cut=True) == (text, "", [])


def test_a_name_comes_before_its_arguments_and_these_as_they_are_written(hear):
    head = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    assert hear(head) == ("", "", [("get_weather", '{"ci')])
    assert hear('<tool_call>\n{"name": "get_weather", "argu')[2] == []


@pytest.mark.threat("tool-calls")
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a <tool_call> b </tool_call> c"),
        ("hermes", '<tool_call>\n{"nam": "now"}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 3}'),
        ("hermes", "<tool_call"),
        ("llama3", '{"a": 1} and more'),
        ("llama3", '<|python_tag|>brave.call("x")'),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral_args", "[TOOL_CALLS]now or never"),
        ("qwen3_coder", "<tool_call>\n<function>"),
        ("pythonic", "[1, 2]"),
        ("functiongemma", "<start_function_call>call now"),
        (None, SPOKEN["hermes"]),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(form, text, hear):
    assert hear(text, form) == (text, "", [])


def test_blanks_next_to_a_call_are_left_out_and_others_kept(hear):
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert hear(f" a \n{call}\n b \n") == (" a\n b \n", "", [("now", "{}")])
    assert hear(f"\n{call}\n\n{call}\n") == ("", "", [("now", "{}"), ("now", "{}")])
    assert hear(" \n ") == (" \n ", "", [])


def test_quotes_and_brackets_in_arguments_end_nothing(hear):
    arguments = r'{"city": "a}\"]{</tool_call>", "n": [[1], {"x": {}}]}'
    assert hear(f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>') == ("", "", [("now", arguments)])


def test_values_between_tags_have_the_type_of_their_parameter(hear):
    def heard(value: str, parameter: str = "days") -> Any:
        tag = f"<parameter={parameter}>\n{value}\n</parameter>"
        return json.loads(
            hear(f"<tool_call><function=get_weather>{tag}</function></tool_call>", "qwen3_coder")[2][0][1]
        )

    assert heard("3") == {"days": 3} and heard("3", "city") == {"city": "3"}
    assert heard("True", "other") == {"other": True} and heard('[1, "a"]', "other") == {"other": [1, "a"]}
    assert heard('say "é"\n<b>', "city") == {"city": 'say "é"\n<b>'} and heard("soon") == {"days": "soon"}


def test_literals_of_python_become_json(hear):
    text = r"""[now(a=True, b=[None, -1.5], c={'d': "it's"}, e='a "q" \' \n', f=word)]"""
    assert json.loads(hear(text, "pythonic")[2][0][1]) == {
        "a": True,
        "b": [None, -1.5],
        "c": {"d": "it's"},
        "e": 'a "q" \' \n',
        "f": "word",
    }


@given(st.text())
def test_texts_of_python_come_back(hear, text):
    ((_, arguments),) = hear(f"[now(a={json.dumps(text)}, b=1)]", "pythonic")[2]
    assert json.loads(arguments) == {"a": text, "b": 1}
    if text.isprintable():
        ((_, arguments),) = hear(f"[now(a={text!r})]", "pythonic")[2]
        assert json.loads(arguments) == {"a": text}


@pytest.mark.threat("tool-schemas")
def test_types_of_schemas_that_branch_without_end_are_found():
    branches = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(90)}
    definitions = {**branches, "d90": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert types_of({"$ref": "#/$defs/d0", "$defs": definitions}) == {"string"}
    assert "object" in types_of({"$ref": "#/$defs/loop", "$defs": definitions})


@pytest.mark.parametrize(
    ("text", "thinking", "heard"),
    [
        ("<think>\na\n\nb\n</think>\n\nc", False, ("c", "a\n\nb")),
        ("\n<think>a</think>c", False, ("c", "a")),
        ("a\n</think>\n\nc", True, ("c", "a")),
        ("a", True, ("", "a")),
        ("<think>a", False, ("", "a")),
        ("<think>\n\n</think>\n\nc", False, ("c", "")),
        (" a <think>b</think>", False, (" a <think>b</think>", "")),
        ("a</think>c", False, ("a</think>c", "")),
        ("a<tool_call>b</think><tool_call>c", True, ("<tool_call>c", "a<tool_call>b")),
    ],
)
def test_reasoning_is_split_off(text, thinking, heard, hear):
    assert hear(text, thinking=thinking) == (*heard, [])


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_text_that_can_hold_no_call_is_handed_on_as_it_comes(thought):
    parser = ChatParser(None, {}, ThinkingMarks("<think>", "</think>"), False, str)
    heard = [parser.push(thought), parser.push("a")]
    assert "".join(parsed.content for parsed in heard) == "a"
    assert [parser.push(text).content for text in (" \n", "<tool_call>", "{")] == [" \n", "<tool_call>", "{"]
    assert parser.finish() == Parsed()
