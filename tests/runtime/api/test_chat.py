"""Conversations from end to end: messages, deltas, tools and reasoning, by a model that says what it is told to."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doubles.speaking import speak

from llmc.runtime import Model, load
from llmc.runtime.api.chat import ChatHandle, Message, MessageDelta, ToolCall
from llmc.runtime.text.chat_template import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments|tojson }}}\n</tool_call>{% endfor %}'
    "{% if message.role == 'tool' %} of {{ message.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools|tojson }}\n{% endif %}<|im_start|>assistant\n{% if open %}<think>\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "open": {"type": "boolean"}},
    "required": ["size", "open"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look at a door.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = [{"role": "user", "content": "What is the door like?"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"size": 7, "open": true}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with load(tiny_bundle, threads=1) as model:
        model.chat_template = ChatTemplate({"default": TEMPLATE}, {})
        yield model


@pytest.fixture
def say(model: Model) -> Callable[[str], list[Callable[..., Any]]]:
    return partial(speak, model)


def joined(deltas: list[MessageDelta]) -> Message:
    """The message that its pieces make, but for the reason of its end."""
    calls: list[ToolCall] = []
    for piece in (call for delta in deltas for call in delta.tool_calls):
        if piece.id is not None:
            assert piece.name is not None and piece.index == len(calls)
            calls.append(ToolCall(piece.id, piece.name, ""))
        calls[piece.index] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + piece.arguments)
    reasoning = "".join(delta.reasoning for delta in deltas) or None
    return Message("".join(delta.content for delta in deltas), reasoning, tuple(calls))


SAID = f"<think>\nA door.\n</think>\n\nLet me look.\n{CALL}\n{NOW}"


def test_an_answer_is_told_apart(model, say):
    result = model.chat(ASKED, tools=TOOLS, max_tokens=200, temperature=0, logits_processors=say(SAID))
    message = result.message
    assert (message.content, message.reasoning, message.finish_reason) == ("Let me look.", "A door.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("look", {"size": 7, "open": True}),
        ("now", {}),
    ]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in message.tool_calls)
    assert result.text == "Let me look." and result.outputs[0].text == SAID and result.messages == (message,)


def test_pieces_make_the_whole_and_come_one_for_each_token(model, say):
    handle = model.stream_chat(ASKED, tools=TOOLS, max_tokens=200, temperature=0, logits_processors=say(SAID))
    deltas = list(handle.deltas())
    (message,) = handle.result().messages
    assert joined(deltas) == Message(message.content, message.reasoning, message.tool_calls)
    assert tuple(token for delta in deltas for token in delta.token_ids) == handle.result().token_ids
    arguments = [piece for delta in deltas for piece in delta.tool_calls if piece.index == 0]
    assert len(arguments) > 3 and list(handle.deltas()) == []


def test_iterating_gives_content_alone(model, say):
    def ask() -> ChatHandle:
        return model.stream_chat(ASKED, tools=TOOLS, max_tokens=200, temperature=0, logits_processors=say(SAID))

    async def read() -> tuple[str, tuple[Message, ...], str]:
        content = "".join([piece async for piece in ask()])
        pieces = [delta async for delta in ask().deltas_async()]
        return content, (await ask()).messages, joined(pieces).content

    content, messages, streamed = asyncio.run(read())
    assert "".join(ask()) == content == messages[0].content == streamed == "Let me look."


def test_text_held_back_for_a_call_comes_at_the_end(model, say):
    handle = model.stream_chat(ASKED, tools=TOOLS, temperature=0, logits_processors=say("ends with <tool"))
    assert "".join(handle) == handle.result().text == "ends with <tool"
    assert handle.result().message.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", "look"])
def test_a_call_that_is_wanted_is_made_and_holds_to_its_schema(model, choice):
    message = model.chat(
        ASKED, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False, max_tokens=400, temperature=1, seed=3
    ).message
    (call,) = message.tool_calls
    assert (message.content, message.finish_reason, call.name) == ("", "tool_calls", "look")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_a_call_that_is_cut_keeps_what_was_written_of_it(model, say):
    cut = len(model.tokenizer.encode(CALL[: CALL.index("open")], add_special_tokens=False))
    given: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "logits_processors": say(CALL)}
    message = model.chat(ASKED, **given, max_tokens=cut).message
    assert message.finish_reason == "length" and message.tool_calls[0].arguments.startswith('{"size": 7')


@pytest.mark.parametrize("stop", [{"stop": ['"open"']}, {"stopping_criteria": [lambda _, text: '"op' in text]}])
@pytest.mark.parametrize("said", [CALL, f"{NOW}\n{CALL}", f"Well.\n\n{CALL}"])
def test_a_call_that_a_stop_breaks_off_is_content(model, say, stop, said):
    given = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "logits_processors": say(said)}
    handle = model.stream_chat(ASKED, **given, **stop)
    deltas, whole = list(handle.deltas()), said.startswith(NOW)
    message = handle.result().message
    assert said.removeprefix(NOW).startswith(message.content) and '"arguments": {"size": 7' in message.content
    assert [call.name for call in message.tool_calls] == ["now"] * whole
    assert message.finish_reason == ("tool_calls" if whole else "stop")
    assert joined(deltas) == Message(message.content, None, message.tool_calls)


def test_a_stop_after_the_arguments_breaks_nothing_off(model, say):
    given = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "logits_processors": say(CALL)}
    message = model.chat(ASKED, **given, stop="</tool_call>").message
    assert (message.content, message.finish_reason, message.tool_calls[0].name) == ("", "tool_calls", "look")


def test_an_answer_that_is_a_call_in_a_code_block_is_a_call(model, say):
    fenced = '```json\n{"name": "look", "arguments": {"size": 400}}\n```'
    given = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "logits_processors": say(fenced)}
    handle = model.stream_chat(ASKED, **given)
    assert "".join(handle) == ""
    message = handle.result().message
    assert (message.content, message.finish_reason) == ("", "tool_calls")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("look", '{"size": 400}')]
    assert model.chat(ASKED, **given, tool_choice="none").message.content == fenced


def test_a_model_may_be_loaded_with_a_format_of_calls(tiny_bundle):
    with load(tiny_bundle, threads=1, self_test=False, tool_format="olmo3") as model:
        asked = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
        model.chat_template = ChatTemplate({"default": TEMPLATE}, {})
        assert model.chat(ASKED, **asked).outputs[0].text == "<function_calls>\nnow()\n</function_calls>"
        own = model.chat(ASKED, **asked, tool_format="pythonic")
        assert (own.outputs[0].text, own.message.tool_calls[0].name) == ("[now()]", "now")


def test_several_outputs_are_several_messages(model):
    handle = model.stream_chat(
        ASKED, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False, n=3, temperature=1, max_tokens=200
    )
    deltas = list(handle.deltas())
    for index, message in enumerate(handle.result().messages):
        assert message.tool_calls == joined([delta for delta in deltas if delta.index == index]).tool_calls
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("now", {})]
    assert len({message.tool_calls[0].id for message in handle.result().messages}) == 3


def test_a_budget_ends_the_reasoning_and_a_form_binds_the_answer(model):
    given: dict[str, Any] = {"chat_template_kwargs": {"open": True}, "temperature": 1, "seed": 5}
    result = model.chat(ASKED, reasoning_budget=9, choice=["yes", "no"], max_tokens=64, **given)
    text = result.outputs[0].text
    thoughts, _, answer = text.partition("</think>")
    assert result.message.content in ("yes", "no") and answer.strip() == result.message.content
    end = len(model.tokenizer.encode("</think>", add_special_tokens=False))
    closing = model.tokenizer.decode(result.token_ids[9 : 9 + end])
    assert closing == "</think>" and model.tokenizer.decode(result.token_ids[:9]) == thoughts


def test_an_answer_goes_on_as_a_conversation(model, say):
    message = model.chat(ASKED, tools=TOOLS, max_tokens=200, temperature=0, logits_processors=say(SAID)).message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "open"} for call in message.tool_calls]
    prompt = model.tokenizer.decode(model.chat_tokens([*ASKED, message.to_dict(), *results]))
    assert f"<think>\nA door.\n</think>\n\nLet me look.\n{CALL}\n{NOW}" in prompt
    assert "open of look" in prompt and "open of now" in prompt


@pytest.fixture
def harmony(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model with a template like that of gpt-oss."""
    path = Path(__file__).parents[1] / "text" / "templates" / "harmony.jinja"
    monkeypatch.setitem(vars(model), "chat_template", ChatTemplate({"default": path.read_text("utf-8")}, {}))
    return model


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = (
    '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"size": 7, "open": true}'
)


def test_harmony_is_told_apart_and_goes_on(harmony, say):
    given: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "chat_template_kwargs": {"reasoning_effort": "low"}}
    said = f"{ANALYSIS}A door.<|end|>{FINAL}It is open."
    message = harmony.chat(ASKED, **given, logits_processors=say(said)).message
    assert (message.content, message.reasoning) == ("It is open.", "A door.")
    said = f"{ANALYSIS}A door.<|end|>{COMMENTARY}"
    handle = harmony.stream_chat(ASKED, tools=TOOLS, **given, logits_processors=say(said))
    message = joined(list(handle.deltas()))
    assert (message.content, message.reasoning) == ("", "A door.")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("look", {"size": 7, "open": True})
    ]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "open"}
    prompt = harmony.tokenizer.decode(harmony.chat_tokens([*ASKED, message.to_dict(), result], tools=TOOLS))
    assert (
        f"{ANALYSIS}A door.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>" in prompt
    )
    assert prompt.endswith(
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"open"<|end|><|start|>assistant'
    )


def test_a_form_binds_what_harmony_has_behind_its_reasoning(harmony):
    given: dict[str, Any] = {"reasoning_budget": 9, "max_tokens": 400, "temperature": 1, "seed": 5}
    result = harmony.chat(ASKED, choice=["yes", "no"], **given)
    assert result.message.content in ("yes", "no")
    assert result.outputs[0].text == f"{ANALYSIS}{result.message.reasoning}<|end|>{FINAL}{result.message.content}"
    message = harmony.chat(ASKED, tools=TOOLS, tool_choice="look", **given).message
    assert message.content == "" and message.reasoning
    jsonschema.validate(json.loads(message.tool_calls[0].arguments), SCHEMA)


def test_a_message_has_the_form_of_openais(model):
    calls = (ToolCall("a", "now", "{}"),)
    assert Message("", None, calls).to_dict() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    assert Message("hi", "hm").to_dict() == {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    assert Message("").to_dict() == {"role": "assistant", "content": ""}
