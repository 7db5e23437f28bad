"""Anthropic's messages through the official client: texts, thoughts, tools, streams and errors."""

import json
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from llmc.runtime import load

USER: dict[str, Any] = {"role": "user", "content": "Write a function."}
# The package has no sampling parameters any more, the API does.
GREEDY: dict[str, Any] = {"model": "able", "messages": [USER], "max_tokens": 12, "extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Add.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CHOICE = {"type": "any", "disable_parallel_tool_use": True}
CALLED: dict[str, Any] = {**GREEDY, "tools": [TOOL], "tool_choice": CHOICE, "max_tokens": 100}
THINKING: dict[str, Any] = {**GREEDY, "thinking": {"type": "enabled", "budget_tokens": 6}, "max_tokens": 24}
BODY: dict[str, Any] = {"model": "able", "messages": [USER], "max_tokens": 4}
VERSION = {"anthropic-version": "2023-06-01"}


def plain(able_http: httpx.Client, messages: list[dict[str, Any]], **given: Any) -> Any:
    body = {"model": "able", "messages": messages, "max_tokens": 12, "temperature": 0, **given}
    return able_http.post("/v1/chat/completions", json=body).json()


def test_the_answer_is_that_of_chat(able_anthropic, able_http):
    answer = able_anthropic.messages.create(system=[{"type": "text", "text": "Be brief."}], **GREEDY)
    wanted = plain(able_http, [{"role": "system", "content": "Be brief."}, USER])
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == wanted["choices"][0]["message"]["content"]
    usage = answer.usage
    assert usage.output_tokens == wanted["usage"]["completion_tokens"]
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == wanted["usage"]["prompt_tokens"]
    assert answer.stop_reason == "max_tokens" and answer.model == "able"


def test_a_stream_joins_to_the_whole(able_anthropic):
    whole = able_anthropic.messages.create(**GREEDY)
    with able_anthropic.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
        == able_anthropic.messages.count_tokens(model="able", messages=[USER]).input_tokens
    )


def test_the_events_of_a_stream_come_in_the_order_of_the_api(able_anthropic):
    kinds = [event.type for event in able_anthropic.messages.create(stream=True, **THINKING)]
    middle = [kind for kind in kinds if kind != "content_block_delta"]
    assert middle[:2] == ["message_start", "content_block_start"] and kinds[2] == "content_block_delta"
    assert middle[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_thoughts_are_a_block_of_their_own_within_their_budget(able_anthropic):
    answer = able_anthropic.messages.create(**THINKING)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.usage.output_tokens_details is not None
    assert 0 < answer.usage.output_tokens_details.thinking_tokens <= 6
    with able_anthropic.messages.stream(**THINKING) as stream:
        streamed = stream.get_final_message().content
    assert (streamed[0].thinking, streamed[1].text) == (answer.content[0].thinking, answer.content[1].text)
    off = able_anthropic.messages.create(**{**GREEDY, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]


def test_a_call_follows_the_schema_of_its_tool(able_anthropic):
    answer = able_anthropic.messages.create(**CALLED)
    call = answer.content[-1]
    assert answer.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "add" and call.input["a"] in range(10)
    with able_anthropic.messages.stream(**CALLED) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in answer.content
    ]


def test_a_conversation_goes_on_after_a_call(able_anthropic, able_http):
    """What the client was given, it gives back as it is; templates read it as they read OpenAI's form."""
    asked = able_anthropic.messages.create(**CALLED)
    call = asked.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "no"}]}
    turns: list[Any] = [
        USER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "Go on."}]},
    ]
    answer = able_anthropic.messages.create(**{**GREEDY, "messages": turns, "tools": [TOOL]})
    function = {"name": "add", "arguments": json.dumps(call.input)}
    told = [
        USER,
        {
            "role": "assistant",
            "content": "".join(block.text for block in asked.content if block.type == "text"),
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]
    tool = {"name": "add", "description": "Add.", "parameters": TOOL["input_schema"]}
    wanted = plain(able_http, told, tools=[{"type": "function", "function": tool}])
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert total == wanted["usage"]["prompt_tokens"]
    counted = able_anthropic.messages.count_tokens(model="able", messages=turns, tools=[TOOL])
    assert counted.input_tokens == total


def test_a_stop_sequence_is_named(able_anthropic):
    text = able_anthropic.messages.create(**GREEDY).content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = able_anthropic.messages.create(stop_sequences=[stop], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)] if answer.content else text.startswith(stop)


def test_an_answer_may_fill_the_context_and_no_more(able_anthropic, able_http):
    room = able_http.get("/v1/models/able").json()["max_model_len"]
    schema = {"type": "string", "minLength": 100_000, "maxLength": 100_000}
    given = {**GREEDY, "max_tokens": 20_000, "messages": [{"role": "user", "content": "a " * (room - 40)}]}
    answer = able_anthropic.messages.create(
        output_config={"format": {"type": "json_schema", "schema": schema}}, **given
    )
    assert answer.stop_reason == "model_context_window_exceeded"
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens == room


def test_an_answer_that_has_begun_is_gone_on_with(able_anthropic, able_http, able_bundle):
    begun = {"role": "assistant", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "add("}]}
    answer = able_anthropic.messages.create(**{**GREEDY, "messages": [USER, begun]})
    turns = [USER, {"role": "assistant", "content": "def add("}]
    with load(able_bundle, threads=1, self_test=False) as model:
        tokens = model.chat_tokens(turns, continue_final_message=True)
        assert model.tokenizer.decode(tokens, False).endswith("<|im_start|>assistant\ndef add(")
    raw = {"model": "able", "prompt": tokens, "max_tokens": 12, "temperature": 0}
    wanted = able_http.post("/v1/completions", json=raw).json()["choices"][0]["text"]
    assert [block.text for block in answer.content] == [wanted]
    assert plain(able_http, turns, continue_final_message=True)["choices"][0]["message"]["content"] == wanted
    counted = able_anthropic.messages.count_tokens(model="able", messages=[USER, begun]).input_tokens
    assert counted == len(tokens) == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


@pytest.mark.threat("no-fetch")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compaction": {"type": "compaction"}}, "compaction is not a parameter"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking.budget_tokens is 4, expected less than"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1, "display": "short"}}, "display"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "So"}]}]},
            "messages[1] is the assistant's and ends with no text",
        ),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "So"}],
                "thinking": {"type": "enabled", "budget_tokens": 1},
            },
            "messages[1] is the beginning of the answer, before which thoughts would come",
        ),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "So"}],
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
            },
            "tool_choice asks for text before the answer",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0].source.type is 'url', expected 'base64'",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(able_http, given, said):
    answer = able_http.post("/v1/messages", json={**BODY, **given}, headers=VERSION)
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and said in body["error"]["message"]


def test_the_version_of_the_api_is_required(able_http):
    for headers in ({}, {"anthropic-version": "2023-01-01"}):
        answer = able_http.post("/v1/messages", json=BODY, headers=headers)
        assert answer.status_code == 400 and "anthropic-version" in answer.json()["error"]["message"]


def test_errors_are_those_of_the_client(able_anthropic):
    with pytest.raises(anthropic.NotFoundError, match="'none' is not here") as caught:
        able_anthropic.messages.create(**{**GREEDY, "model": "none"})
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="embeds texts"):
        able_anthropic.messages.create(**{**GREEDY, "model": "embed"})
    with pytest.raises(anthropic.BadRequestError, match="leaves no room"):
        able_anthropic.messages.create(**{**GREEDY, "messages": [{"role": "user", "content": "a " * 5000}]})


def test_an_error_amid_a_stream_is_raised_by_the_client(able_anthropic):
    given = {**GREEDY, "max_tokens": 400, "extra_body": {"deadline_s": 0.05, "ignore_eos": True}}
    with pytest.raises(anthropic.APIStatusError, match="deadline") as caught:
        for _ in able_anthropic.messages.create(stream=True, **given):
            pass
    assert caught.value.type == "timeout_error"
