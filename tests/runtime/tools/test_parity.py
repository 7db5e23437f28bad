"""The same outputs read by transformers, for the families whose answers it can tell apart."""

import json

import pytest
from doubles.hearing import merged

from llmc.runtime.tools.calls import read_tools
from llmc.runtime.tools.formats import FORMATS
from llmc.runtime.tools.parser import ChatParser
from llmc.runtime.tools.thinking import MARKS, marks_of

PARIS = '{"city": "Paris \\"\\u00e9\\"", "days": 3, "unit": "kelvin"}'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, 7e\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# By the model_type and the format: what a model of the family may say.
SAID = {
    ("qwen3", "hermes"): [
        "Just text.",
        "<think>\nWell.\n\nWell.\n</think>\n\nText.",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        f"<think>\nWell.\n</think>\n\n{NOW}\n{NOW}",
    ],
    ("qwen3_5", "qwen3_coder"): ["Just text.", f"Let me see.\n{XML}", f"<think>\nWell.\n</think>\n\n{XML}\n{XML}"],
    ("gemma4", "gemma4"): [
        "Just text.",
        '<|tool_call>call:get_weather{city:<|"|>Paris, {7e}<|"|>,days:3}<tool_call|>',
        "<|channel>thought\nWell.<channel|><|tool_call>call:now{}<tool_call|>",
    ],
}


@pytest.mark.parametrize(("kind", "form", "text"), [(*names, text) for names, texts in SAID.items() for text in texts])
def test_with_transformers(kind, form, text, tools):
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as TEMPLATES
    from transformers.utils.chat_parsing import parse_response

    template = next(found for kinds, found in TEMPLATES.items() if kind in kinds)
    anchor = template["start_anchor"]
    prefix = anchor if isinstance(anchor, str) else anchor[0]
    found = parse_response(text, template, prefix=prefix, tools=tools)
    marks = next(marks for marks in MARKS if marks.begin == template["fields"]["reasoning_content"]["open"].strip())
    known = {tool.name: tool for tool in read_tools(tools)}
    parser = ChatParser(FORMATS[form], known, marks, False, str)
    parsed = [parser.push(text), parser.finish()]
    content, reasoning, calls = merged(parsed)
    assert marks_of(f"{marks.begin}{marks.end}") == marks
    assert (
        content == (found.get("content") or "").strip() and reasoning == (found.get("reasoning_content") or "").strip()
    )
    theirs = [call["function"] for call in found.get("tool_calls", [])]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (call["name"], call["arguments"]) for call in theirs
    ]
