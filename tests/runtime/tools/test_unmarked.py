"""Answers that are calls without a format's marks, and what only looks like them."""

import json

import pytest

from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import FORMATS
from llmc.runtime.tools.plan import ChatPlan
from llmc.runtime.tools.thinking import MARKS

PARIS = '{"city": "Paris", "days": 3}'
WEATHER = f'{{"name": "get_weather", "arguments": {PARIS}}}'
NOW = '{"name": "now", "arguments": {}}'
ONE = [("get_weather", PARIS)]
TWO = [*ONE, ("now", "{}")]
READ = {
    "bare": (WEATHER, ONE),
    "blanks around": (f"\n \t{WEATHER} \r\n\n", ONE),
    "pretty": (f'{{\n  "name" : "get_weather" ,\n  "arguments" :\n{PARIS}\n}}', ONE),
    "arguments first": (f'{{"arguments": {PARIS}, "name": "get_weather"}}', ONE),
    "parameters": (f'{{"name": "get_weather", "parameters": {PARIS}}}', ONE),
    "arguments as text": (f'{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}', ONE),
    "id and type": (f'{{"id": "call_1", "type": "function", "name": "get_weather", "arguments": {PARIS}}}', ONE),
    "nested": (f'{{"type": "function", "function": {WEATHER}}}', ONE),
    "nested, with id last": (f'{{"type": "function", "function": {WEATHER}, "id": 1}}', ONE),
    "function as the name": (f'{{"function": "get_weather", "arguments": {PARIS}}}', ONE),
    "escaped name": (WEATHER.replace("get", r"\u0067et"), ONE),
    "fence": (f"```\n{WEATHER}\n```", ONE),
    "json fence": (f"```json\n{WEATHER}\n```\n", ONE),
    "tool_call fence": (f"```tool_call\n{WEATHER}\n```", ONE),
    "fence with a space": (f"``` json\n{WEATHER}\n```", ONE),
    "longer fence": (f"````json5\n{WEATHER}\n````", ONE),
    "tildes": (f"~~~json\n{WEATHER}\n~~~", ONE),
    "inline code": (f"`{WEATHER}`", ONE),
    "fence in a line": (f"```json{WEATHER}```", ONE),
    "fence not closed": (f"```json\n{WEATHER}\n", ONE),
    "tag": (f"<tools>\n{WEATHER}\n</tools>", ONE),
    "two in lines": (f"{WEATHER}\n{NOW}", TWO),
    "two with a comma": (f"{WEATHER},\n{NOW}", TWO),
    "two with a semicolon": (f"{WEATHER}; {NOW}", TWO),
    "two with nothing between": (f"{WEATHER}{NOW}", TWO),
    "list": (f"[{WEATHER}, {NOW}]", TWO),
    "list in a fence": (f"```json\n[\n  {WEATHER},\n  {NOW}\n]\n```", TWO),
    "two in a fence": (f"```json\n{WEATHER}\n{NOW}\n```", TWO),
    "two fences": (f"```json\n{WEATHER}\n```\n\n```json\n{NOW}\n```", TWO),
    "two tags": (f"<tool>{WEATHER}</tool><tool>{NOW}</tool>", TWO),
    "fence in a text": (
        r'{"name": "now", "arguments": {"a": "```\"}] </tools>"}}',
        [("now", r'{"a": "```\"}] </tools>"}')],
    ),
}
CONTENT = {
    "text before": f"Here: {WEATHER}",
    "text after": f"{WEATHER}\nThis asks for the weather.",
    "text before a fence": f"Sure:\n```json\n{WEATHER}\n```",
    "text after a fence": f"```json\n{WEATHER}\n```\nDone.",
    "text between": f"```json\n{WEATHER}\n```\nand\n```json\n{NOW}\n```",
    "unknown name": WEATHER.replace("get_weather", "get_news"),
    "one unknown of two": f"{WEATHER}\n{NOW.replace('now', 'later')}",
    "no name": f'{{"arguments": {PARIS}}}',
    "no arguments": '{"name": "now"}',
    "null": '{"name": "now", "arguments": null}',
    "list as arguments": '{"name": "now", "arguments": []}',
    "text as arguments": '{"name": "now", "arguments": "soon"}',
    "number as name": '{"name": 1, "arguments": {}}',
    "another key": '{"name": "now", "description": "a", "parameters": {}}',
    "name twice": '{"name": "now", "name": "now", "arguments": {}}',
    "arguments twice": '{"name": "now", "arguments": {}, "parameters": {}}',
    "empty": "{}",
    "empty list": "[]",
    "empty fence": "```json\n```",
    "other json": '{"temperature": 12, "name": "now", "arguments": {}}',
    "list of numbers": "[1, 2]",
    "no JSON": "{'name': 'now', 'arguments': {}}",
    "NaN": '{"name": "now", "arguments": {"a": NaN}}',
    "open": WEATHER[:-1],
    "open list": f"[{WEATHER}",
    "comma at the end": f"{WEATHER},",
    "other fence closed": f"```json\n{WEATHER}\n~~~",
    "half a fence": f"```json\n{WEATHER}\n``",
    "code": "```python\nprint(1)\n```",
    "html": "<b>now</b>",
    "blanks": " \n ",
    "nothing": "",
}


@pytest.mark.parametrize("kind", READ)
def test_a_whole_answer_of_call_objects_is_calls(kind, hear):
    text, calls = READ[kind]
    for form in ("hermes", "llama3", "pythonic", "cohere", "qwen3_coder", "gemma4"):
        content, _, heard = hear(text, form)
        assert content.strip() == "", form
        assert [(name, json.loads(given)) for name, given in heard] == [
            (name, json.loads(given)) for name, given in calls
        ], form
        assert hear(list(text), form) == (content, "", heard), form


@pytest.mark.parametrize("kind", CONTENT)
def test_what_is_more_or_less_than_calls_is_content_to_the_last_character(kind, hear):
    text = CONTENT[kind]
    assert hear(text) == hear(list(text)) == (text, "", [])


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_reads_unmarked_calls_and_marked_ones_win(form, hear):
    fenced = f"```json\n{WEATHER}\n```"
    assert hear(fenced, form) == ("", "", ONE)
    marked = FORMATS[form].write([("now", {})])
    if not FORMATS[form].bare_starts:
        content, _, calls = hear(f"{fenced}{marked}", form)
        assert (content, calls) == (fenced, [("now", "{}")])


def test_harmony_reads_them_in_its_last_message(hear):
    marks = next(marks for marks in MARKS if marks.form == "harmony")
    text = f"{marks.begin}Hm.{marks.end}{marks.answer}{WEATHER}<|return|>"
    assert hear(text, "harmony", marks=marks) == hear(list(text), "harmony", marks=marks) == ("", "Hm.", ONE)


def test_they_are_read_after_reasoning_and_written_as_they_were(hear):
    given = '{ "city":"S\\u00e3o",\n "days": 1.50 }'
    text = f'<think>\nhm\n</think>\n\n```json\n{{"name": "get_weather", "arguments": {given}}}\n```'
    assert hear(text) == ("", "hm", [("get_weather", given)])
    (_, given), *_ = hear('{"name": "now", "arguments": {"a": "b\nc"}}')[2]
    assert json.loads(given) == {"a": "b\nc"}  # a line end in a text, which strict readers of JSON refuse


def test_one_that_is_cut_is_content(hear):
    for end in range(1, len(WEATHER)):
        assert hear(WEATHER[:end], cut=True) == (WEATHER[:end], "", [])


def test_where_one_call_may_come_two_are_content(hear):
    assert hear(WEATHER, parallel=False) == ("", "", ONE)
    for text in (f"{WEATHER}\n{NOW}", f"[{WEATHER}, {NOW}]"):
        assert hear(text, parallel=False) == (text, "", [])


@pytest.mark.parametrize(
    ("tools", "goes_on", "shaped"),
    [((), False, False), ([{"name": "now"}], True, False), ([{"name": "now"}], False, True)],
)
def test_none_is_read_where_no_call_may_come_or_the_answer_has_begun_or_a_form(tools, goes_on, shaped):
    form = FORMATS["hermes"] if tools else None
    plan = ChatPlan(form, read_tools(tools), False, True, None, False, goes_on=goes_on)
    parser = plan.parser(str, shaped=shaped)
    assert (parser.push(NOW).content + parser.finish().content) == NOW


@pytest.mark.parametrize(
    ("text", "released"),
    [
        ("Well", "Well"),
        ("{", ""),
        ('{"na', ""),
        ('{"answer": 1', '{"answer": 1'),
        ('{"name": "Bob"', '{"name": "Bob"'),
        ("```py\npr", "```py\npr"),
        ("[1", "[1"),
        (WEATHER, ""),
        (f"{WEATHER}\nThis", f"{WEATHER}\nThis"),
    ],
)
def test_text_is_held_back_as_long_as_it_may_be_a_call(text, released):
    plan = ChatPlan(FORMATS["hermes"], read_tools([{"name": "get_weather"}]), False, True, None, False)
    parser = plan.parser(str)
    assert "".join(parser.push(character).content for character in text) == released
