"""Formats and reasoning by what templates hold, and what requests may ask for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import UsageError
from llmc.runtime.text.detokenizer import decode_all
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.tools.calls import MOST_TOOLS, read_tools
from llmc.runtime.tools.formats import FORMATS, format_of
from llmc.runtime.tools.plan import plan_chat
from llmc.runtime.tools.thinking import marks_of

# The sentences and marks by which published templates teach calls, each in a template of our own.
TEACHING = {
    "hermes": 'return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ...}</tool_call>',
    "qwen3_coder": "in this format:\n<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>",
    "seed_oss": "{%- set begin = '<seed:tool_call>' -%}<function={{ call.name }}>",
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "mistral": "{{- '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}{{ call.function|tojson }}{% endfor %}]",
    "mistral_args": "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}",
    "hunyuan": "put them into <tool_calls>[{{ call }}]</tool_calls>",
    "granite": "respond with <|tool_call|> followed by a JSON list of tools used.",
    "phi4_mini": "{{ '<|tool|>' + tools + '<|/tool|>' }}",
    "functools": 'write functools[{"name": ...}]',
    "cohere": "write <|START_ACTION|> followed by a list of JSON-formatted tool calls",
    "olmo3": "Output any function calls within <function_calls></function_calls> XML tags.",
    "functiongemma": "{{ '<start_function_call>call:' + name + '{' }}",
    "gemma4": "{{ '<|tool_call>call:' + name + '{' }}",
    "harmony": "{{ '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}",
    "pythonic": "you must respond with a python list of the function calls.",
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_format_is_the_one_that_the_template_teaches(form):
    assert format_of(f"{{% for message in messages %}}{TEACHING[form]}{{% endfor %}}") == form


def test_the_documentation_lists_every_format():
    page = (Path(__file__).parents[3] / "runtime" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(any(f"`{form}`" in row.split(" | ")[0] for row in rows) for form in FORMATS)


def test_the_older_template_of_llama_names_the_tag_alone():
    assert format_of("{{ '<|python_tag|>' + call }}") == "llama3"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{{ message.content.split('</think>')[-1] }}", "</think>"),
        ("[THINK]{{ thoughts }}[/THINK]", "[/THINK]"),
        ("{%- set end = '</seed:think>' -%}", "</seed:think>"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|>", "<|END_THINKING|>"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}", "<|end|>"),
        ("<|assistant|>{{ message.content }}<|end|>", None),
        ("{{ message.content }}", None),
    ],
)
def test_the_marks_of_reasoning_are_the_templates(template, end):
    marks = marks_of(template)
    assert (marks and marks.end) == end


def plan(prompt: str = "", template: str = TEACHING["hermes"] + "</think>", **asked: Any) -> Any:
    tools = read_tools(asked.pop("tools", [{"function": {"name": "now"}}]))
    given = {"parallel": True, "tool_format": None, "reasoning_budget": None, **asked}
    return plan_chat(template, prompt, tools, given.pop("tool_choice", "auto"), **given)


def test_a_prompt_may_have_opened_or_closed_the_reasoning():
    assert plan("<|assistant|>\n<think>\n").thinking and not plan("<think>a</think> b").thinking
    assert plan("<think>\n\n</think>\n\n").marks is None and plan("said <think>").marks is not None


def test_reasoning_is_bound_where_the_answer_is_guided_or_a_budget_is_given(tiny_tokenizer):
    free: Mapping[str, Any] = plan(tools=[]).make_sampling(tiny_tokenizer, {})
    assert "thinking" not in free and "grammar" not in free
    assert plan(tools=[], reasoning_budget=3).make_sampling(tiny_tokenizer, {})["thinking"].budget == 3
    assert plan(tools=[]).make_sampling(tiny_tokenizer, {"regex": "a"})["thinking"].budget is None
    assert plan().make_sampling(tiny_tokenizer, {})["thinking"].opened is False


def test_marks_that_are_special_tokens_are_made_visible(tiny_checkpoint):
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    tokenizer._backend.add_special_tokens(["<tool_call>", "<|channel>", "<channel|>"])
    tokenizer = Tokenizer(tokenizer._backend, {})
    ids = [tokenizer.token_to_id(mark) for mark in ("<tool_call>", "<|channel>", "<channel|>")]
    template = "<|channel>thought <channel|> <tool_call>"
    assert plan(template=template).make_sampling(tokenizer, {})["shown_tokens"] == tuple(sorted(ids))
    tokens = [ids[0], *tokenizer.encode("é", False), ids[1], ids[2], 0]
    assert decode_all(tokenizer, tokens, ids) == "<tool_call>é<|channel><channel|>"
    assert decode_all(tokenizer, tokens, ids[:1]) == "<tool_call>é" and decode_all(tokenizer, tokens) == "é"


def test_no_calls_are_read_where_none_are_wanted(tiny_tokenizer):
    assert plan(tool_choice="none").calls is None and plan(tools=[]).calls is None
    assert plan(tool_choice="none", template="shows no calls").make_sampling(tiny_tokenizer, {}) == {"shown_tokens": ()}


NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


@pytest.mark.threat("tool-schemas")
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"template": "no calls"}, "teaches no known format of calls; name one with tool_format"),
        ({"tool_format": "xml"}, "tool_format is 'xml', expected one of hermes"),
        ({"tool_choice": "later"}, "tool_choice is 'later', expected one of auto, none, required, now"),
        ({"tool_choice": 1}, "tool_choice is 1, expected auto, none, required or a tool's name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice is 'required', but the request has no tools"),
        ({"template": "a", "tools": [], "reasoning_budget": 1}, "has no reasoning"),
        ({"tools": "now"}, "tools is 'now', expected a list of functions"),
        ({"tools": [NOW] * (MOST_TOOLS + 1)}, f"tools holds {MOST_TOOLS + 1} functions, expected at most {MOST_TOOLS}"),
        ({"tools": [NOW, NOW]}, "tools holds 'now' twice"),
        ({"tools": [{"type": "browser"}]}, r"tools\[0\] is .*browser"),
        ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\] has the name 'a b'"),
        ({"tools": [{"function": {"name": "a", "parameters": 1}}]}, "parameters is 1, expected a JSON schema"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]},
            "parameters has the type 'array', expected 'object'",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(asked, reason):
    with pytest.raises(UsageError, match=reason):
        plan(**asked)


@pytest.mark.parametrize("budget", [-1, True, 1.5, "2"])
def test_a_budget_is_a_number_of_tokens(budget):
    with pytest.raises(UsageError, match=r"reasoning_budget is .*, expected an integer of at least 0"):
        plan(reasoning_budget=budget)
