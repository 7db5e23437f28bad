"""Anthropic's client: what it was given it gives back, as objects and as their dumps with every null."""

from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

USER: dict[str, Any] = {"role": "user", "content": "Write a function."}
GREEDY: dict[str, Any] = {"model": "able", "max_tokens": 100, "extra_body": {"temperature": 0}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
MARK = {"type": "ephemeral"}
TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": SCHEMA, "cache_control": MARK}]
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def client(service_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=service_url, api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dumps", [False, True], ids=["objects", "dumps"])
def test_a_tool_is_called_and_its_result_answered(client, streams, dumps):
    asked: dict[str, Any] = {**GREEDY, "messages": [USER], "tools": TOOLS, "tool_choice": ONE}
    if streams:
        with client.messages.stream(**asked) as stream:
            events = [event.type for event in stream]
            answer = stream.get_final_message()
        assert events[0] == "message_start" and events[-1] == "message_stop" and "input_json" in events
    else:
        answer = client.messages.create(**asked)
    call = answer.content[-1]
    assert answer.stop_reason == "tool_use" and call.input["a"] in range(10)
    said = [block.model_dump() for block in answer.content] if dumps else answer.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3", "cache_control": MARK}
    turns: Any = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": MARK}]
    follows = client.messages.create(**{**GREEDY, "max_tokens": 12}, messages=turns, tools=TOOLS, system=system)
    assert [block.type for block in follows.content] == ["text"] and follows.content[0].text
    counted = client.messages.count_tokens(model="able", messages=turns, tools=TOOLS, system=system)
    assert counted.input_tokens == follows.usage.input_tokens + follows.usage.cache_read_input_tokens


@pytest.mark.parametrize("dumps", [False, True], ids=["objects", "dumps"])
def test_thoughts_are_given_back(client, dumps):
    thinking: Any = {"type": "enabled", "budget_tokens": 6}
    answer = client.messages.create(**{**GREEDY, "max_tokens": 24}, messages=[USER], thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    said = [block.model_dump() for block in answer.content] if dumps else answer.content
    turns: Any = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    with client.messages.stream(**{**GREEDY, "max_tokens": 24}, messages=turns, thinking=thinking) as stream:
        kinds = {event.type for event in stream}
        later = stream.get_final_message()
    assert {"thinking", "text"} <= kinds and later.content[0].thinking
    bare = [USER, {"role": "assistant", "content": said[1:]}, turns[2]]
    count = client.messages.count_tokens
    shown = count(model="able", messages=turns, thinking=thinking).input_tokens
    assert shown > count(model="able", messages=bare, thinking=thinking).input_tokens


def test_what_the_command_line_client_sends_is_accepted(client):
    """Edits that change nothing, marks of caches everywhere, and wishes for speed."""
    given: Any = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"device_id":"a","session_id":"b"}'},
        "service_tier": "auto",
        "speed": "fast",
        "cache_control": MARK,
        "temperature": 0,
    }
    asked = client.messages.with_raw_response.create(model="able", max_tokens=4, messages=[USER], extra_body=given)
    assert asked.headers["x-llmc-ignored"] == "cache_control, context_management, service_tier, speed"
