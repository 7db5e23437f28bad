"""OpenAI's responses through the official client: items, streams, tools, and conversations that are stored."""

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from doubles.serving import serving

from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.models.response_store import ResponseStore, Stored, make_stored

GREEDY: dict[str, Any] = {"model": "able", "input": "Write a function.", "max_output_tokens": 12, "temperature": 0}
USER = {"role": "user", "content": "Write a function."}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
CALLED: dict[str, Any] = {
    **GREEDY,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 100,
}


ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
COUNTED = {"model", "input", "instructions", "tools", "reasoning", "previous_response_id"}


def plain(able_http: httpx.Client, messages: list[dict[str, Any]], **given: Any) -> Any:
    body = {"model": "able", "messages": messages, "max_tokens": 12, "temperature": 0, **given}
    return able_http.post("/v1/chat/completions", json=body).json()


def test_the_answer_is_that_of_chat(able_openai, able_http):
    answer = able_openai.responses.create(instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
    wanted = plain(able_http, [{"role": "system", "content": "Be brief."}, USER])
    assert answer.output_text == wanted["choices"][0]["message"]["content"]
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be brief." and answer.temperature == 0


def test_a_stream_has_every_event_and_joins_to_the_whole(able_openai):
    whole = able_openai.responses.create(**GREEDY)
    events = list(able_openai.responses.create(stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_thoughts_are_an_item_of_their_own(able_openai):
    given = {**GREEDY, "reasoning": {"effort": "minimal"}, "max_output_tokens": 160}
    answer = able_openai.responses.create(**given)
    assert answer.output[0].type == "reasoning" and answer.usage is not None
    text = answer.output[0].content[0].text
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens <= 128
    events = list(able_openai.responses.create(stream=True, **given))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == text
    assert [item.type for item in events[-1].response.output] == [item.type for item in answer.output]


def test_a_call_follows_its_schema_and_is_streamed(able_openai):
    answer = able_openai.responses.create(**CALLED)
    call = answer.output[-1]
    assert answer.status == "completed" and call.type == "function_call" and call.name == "add"
    assert json.loads(call.arguments)["a"] in range(10)
    events = list(able_openai.responses.create(stream=True, **CALLED))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert [event.arguments for event in done] == [item.arguments for item in answer.output if hasattr(item, "call_id")]
    assert "".join(deltas) == "".join(event.arguments for event in done)


def test_a_conversation_goes_on_with_items(able_openai, able_http):
    """What the client was given, it gives back as it is."""
    asked = able_openai.responses.create(**CALLED)
    call = asked.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    answer = able_openai.responses.create(
        **{**GREEDY, "input": [USER, *asked.output, result], "tools": [TOOL], "store": False}
    )
    follows = able_openai.responses.create(
        **{**GREEDY, "input": [result], "tools": [TOOL], "previous_response_id": asked.id}
    )
    function = {"name": "add", "arguments": call.arguments}
    told = [
        USER,
        {
            "role": "assistant",
            "content": asked.output_text,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    tool = {name: TOOL[name] for name in ("name", "description", "parameters")}
    wanted = plain(able_http, told, tools=[{"type": "function", "function": tool}])
    for found in (answer, follows):
        assert found.output_text == wanted["choices"][0]["message"]["content"]
        assert found.usage is not None and found.usage.input_tokens == wanted["usage"]["prompt_tokens"]


def test_a_stored_conversation_goes_on_and_can_be_read_and_deleted(able_openai):
    first = able_openai.responses.create(**GREEDY)
    second = able_openai.responses.create(**{**GREEDY, "input": "Go on.", "previous_response_id": first.id})
    turns: Any = [USER, *first.output, {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]
    by_hand = able_openai.responses.create(**{**GREEDY, "input": turns, "store": False})
    assert second.output_text == by_hand.output_text and second.usage and by_hand.usage
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    assert able_openai.responses.retrieve(second.id) == second
    items = able_openai.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.role for item in items] == ["user", "assistant", "user"]  # over two pages
    able_openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        able_openai.responses.create(**{**GREEDY, "previous_response_id": second.id})
    for gone in (first.id, by_hand.id):
        with pytest.raises(openai.NotFoundError, match="is stored"):
            able_openai.responses.retrieve(gone)


def test_logprobs_are_those_of_the_text(able_openai):
    answer = able_openai.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY)
    part = answer.output[0].content[0]
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode().startswith(part.text)
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


@pytest.mark.threat("no-fetch")
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "x"}, "conversation"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"truncation": "auto", "on_overflow": "sink"}, "on_overflow"),
        ({"input": []}, "input"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"metadata": {"a": 1}}, "metadata.a"),
        (
            {"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools",
        ),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"safety_identifier": "x" * 257}, "safety_identifier"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(able_http, given, param):
    answer = able_http.post("/v1/responses", json={"model": "able", "input": "a", **given})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_what_changes_no_answer_is_accepted_and_named(able_http):
    given = {
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": True},
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    }
    answer = able_http.post("/v1/responses", json={**GREEDY, **given})
    named = set(answer.headers["x-llmc-ignored"].split(", "))
    assert answer.status_code == 200
    assert named == {*given, "summary", "include.reasoning.encrypted_content"} - {"reasoning", "include"}
    without = able_http.post("/v1/responses", json={**GREEDY, "include": given["include"]})
    assert [item["content"] for item in answer.json()["output"]] == [
        item["content"] for item in without.json()["output"]
    ]


def test_errors_are_those_of_the_client(able_openai, able_http):
    with pytest.raises(openai.NotFoundError, match="'none' is not here"):
        able_openai.responses.create(model="none", input="a")
    with pytest.raises(openai.BadRequestError, match="embeds texts"):
        able_openai.responses.create(model="embed", input="a")
    assert able_http.get("/v1/responses/resp-1?stream=true&include=all").status_code == 400


def test_a_server_that_keeps_nothing_says_so(tiny_bundle):
    with serving(ServerConfig(models={"tiny": tiny_bundle}, threads=1, response_store_bytes=0)) as url:
        body = {"input": "a", "max_output_tokens": 2}
        assert httpx.post(f"{url}/v1/responses", json=body).json()["store"] is False
        refused = httpx.post(f"{url}/v1/responses", json={**body, "store": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "store"


def named(name: str, previous: str | None = None, text: str = "") -> tuple[str, Stored]:
    asked, answer = {"id": f"{name}?", "text": f"{name}?"}, {"id": f"{name}!", "text": f"{name}!{text}"}
    return name, make_stored(previous, [asked], {"id": name, "output": [answer]})


def texts(store: ResponseStore, owner: str | None, name: str) -> list[str]:
    return [item["text"] for item in store.conversation(owner, name)]


def test_a_conversation_is_its_turns_in_order():
    store = ResponseStore(10_000)
    store.put(None, *named("a"))
    store.put(None, *named("b", "a"))
    assert texts(store, None, "b") == ["a?", "a!", "b?", "b!"]


@pytest.mark.threat("stored-responses")
def test_no_key_sees_what_another_one_stored():
    store = ResponseStore(10_000)
    store.put("one", *named("a"))
    for other in ("two", None):
        with pytest.raises(ApiError, match="no response 'a' is stored"):
            store.get(other, "a")
        with pytest.raises(ApiError, match="no response 'a' is stored"):
            store.delete(other, "a")
    assert texts(store, "one", "a") == ["a?", "a!"]


@pytest.mark.threat("stored-responses")
def test_what_was_used_longest_ago_makes_room_and_conversations_stay_whole():
    store = ResponseStore(3 * named("a", "b")[1].size)
    store.put(None, *named("a"))
    store.put(None, *named("b"))
    store.put(None, *named("c", "a"))
    store.put(None, *named("d"))  # b leaves, though a is older: c goes on from it
    assert texts(store, None, "c") == ["a?", "a!", "c?", "c!"]
    with pytest.raises(ApiError):
        store.get(None, "b")


def test_what_is_kept_is_read_as_it_was_sent_without_being_parsed(http, monkeypatch):
    sent = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 4, "top_logprobs": 2})
    monkeypatch.setattr("llmc.runtime.server.dialects.responses.read", lambda kept: pytest.fail("it was parsed"))
    assert http.get(f"/v1/responses/{sent.json()['id']}").content == sent.content


@pytest.mark.threat("stored-responses")
def test_bytes_are_bounded():
    store = ResponseStore(1000)
    for number in range(50):
        store.put(None, *named(str(number), text="x" * 100))
        assert store.bytes <= 1000
    store.put(None, *named("large", text="x" * 2000))
    for gone in ("0", "large"):
        with pytest.raises(ApiError):
            store.get(None, gone)
    kept = 1000 // named("49", text="x" * 100)[1].size
    for number in range(50 - kept, 50):
        store.delete(None, str(number))
    assert kept > 1 and store.bytes == 0


@pytest.mark.parametrize(
    ("given", "temperature"), [({}, 0), ({"seed": 1}, 0), ({"mirostat": 2}, 1), ({"top_k": 5}, 1), ({"min_p": 0.1}, 1)]
)
def test_the_temperature_is_told_that_the_answer_is_drawn_with(able_http, given, temperature):
    asked = {"model": "able", "input": "a", "max_output_tokens": 1, **given}
    assert able_http.post("/v1/responses", json=asked).json()["temperature"] == temperature


def test_input_tokens_are_those_that_the_request_would_have(able_openai):
    given: dict[str, Any] = {"instructions": "Be brief.", "tools": [TOOL], "reasoning": {"effort": "low"}}
    first = able_openai.responses.create(**GREEDY, **given)
    for more in ({}, {"previous_response_id": first.id}):
        asked = {name: value for name, value in {**GREEDY, **given, **more}.items() if name in COUNTED}
        count = able_openai.responses.input_tokens.count(**asked)
        assert count.object == "response.input_tokens"
        assert count.input_tokens == able_openai.responses.create(**GREEDY, **given, **more).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="personality is not a parameter"):
        able_openai.responses.input_tokens.count(model="able", input="a", personality="friendly")
