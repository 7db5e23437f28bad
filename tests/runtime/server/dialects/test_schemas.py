"""Answers and events of OpenAI's responses and Anthropic's messages, compared with the official clients' types."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
RESPONSE: dict[str, Any] = {"model": "able", "input": "Write a function.", "max_output_tokens": 40, "temperature": 0}
MESSAGE: dict[str, Any] = {
    "model": "able",
    "messages": [{"role": "user", "content": "Write a function."}],
    "max_tokens": 40,
    "temperature": 0,
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "text": {"verbosity": "medium"}},
    "thoughts": {"reasoning": {"effort": "minimal", "summary": "auto"}},
    "calls": {
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
        "max_output_tokens": 100,
    },
}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"stop_sequences": ["a"]},
    "thoughts": {"thinking": {"type": "enabled", "budget_tokens": 6, "display": "summarized"}},
    "calls": {"tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 100},
}
# Fields that the published schemas require where the clients' types have a default.
ALWAYS = {
    "response": {"completed_at", "incomplete_details", "error", "instructions", "metadata", "temperature", "top_p"}
    | {"presence_penalty", "frequency_penalty", "top_logprobs", "max_output_tokens", "max_tool_calls", "reasoning"}
    | {"background", "store", "service_tier", "status", "text", "truncation", "usage", "previous_response_id"}
    | {"safety_identifier", "prompt_cache_key"},
    "message": {"container", "stop_details", "stop_reason", "stop_sequence"},
    "usage": {"cache_creation", "inference_geo", "service_tier"},
    "delta usage": {"cache_creation_input_tokens", "cache_read_input_tokens", "input_tokens"}
    | {"output_tokens_details", "server_tool_use"},
    "tool_use": {"caller"},
}
# Of Open Responses, without a field in OpenAI's client, or not at every place.
OPEN = {"presence_penalty", "frequency_penalty", "store", "bytes"}


def undeclared(found: Any) -> Iterator[str]:
    """Fields that a type of the client does not have, at any depth."""
    if isinstance(found, BaseModel):
        yield from found.model_extra or ()
        found = [getattr(found, name) for name in type(found).model_fields]
    for one in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from undeclared(one)


def check(kind: Any, value: Any) -> None:
    """Every required field is there, each is of its type, and none is unknown."""
    found = TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    assert set(undeclared(found)) <= OPEN


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("given", RESPONSES.values(), ids=RESPONSES)
def test_a_response_its_events_and_its_items_are_as_published(able_http, given):
    whole = able_http.post("/v1/responses", json={**RESPONSE, **given}).json()
    events = events_of(able_http.post("/v1/responses", json={**RESPONSE, **given, "stream": True}))
    for event in events:
        check(ResponseStreamEvent, event)
    for response in (whole, events[0]["response"], events[-1]["response"]):
        check(Response, response)
        assert ALWAYS["response"] <= response.keys() and response["temperature"] == 0
    on = {"previous_response_id": whole["id"], "input": [*whole["output"], {"role": "user", "content": "Go on."}]}
    later = able_http.post("/v1/responses", json={**RESPONSE, **on}).json()["id"]
    items = able_http.get(f"/v1/responses/{later}/input_items").json()["data"]
    assert len(items) > 2
    for item in items:
        check(ResponseItem, item)
    check(
        InputTokenCountResponse,
        able_http.post("/v1/responses/input_tokens", json={"input": "a", "model": "able"}).json(),
    )


@pytest.mark.parametrize("given", MESSAGES.values(), ids=MESSAGES)
def test_a_message_and_its_events_are_as_published(able_http, given):
    version = {"anthropic-version": "2023-06-01"}
    whole = able_http.post("/v1/messages", json={**MESSAGE, **given}, headers=version).json()
    events = events_of(able_http.post("/v1/messages", json={**MESSAGE, **given, "stream": True}, headers=version))
    for event in events:
        check(RawMessageStreamEvent, event)
    (delta,) = (event for event in events if event["type"] == "message_delta")
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for message in (whole, events[0]["message"]):
        check(Message, message)
        assert ALWAYS["message"] <= message.keys()
        assert ALWAYS["usage"] | ALWAYS["delta usage"] <= message["usage"].keys()
    assert ALWAYS["message"] <= delta["delta"].keys() and ALWAYS["delta usage"] <= delta["usage"].keys()
    for block in [*whole["content"], *begun]:
        assert ALWAYS.get(block["type"], set()) <= block.keys()
        assert None not in block.values()  # @ai-sdk/anthropic refuses "citations": null
    counted = {"model": "able", "messages": MESSAGE["messages"]}
    check(MessageTokensCount, able_http.post("/v1/messages/count_tokens", json=counted, headers=version).json())


CHAT: dict[str, Any] = {"model": "able", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
TEXT: dict[str, Any] = {"model": "able", "prompt": "def f(", "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body", "kind", "piece"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, ChatCompletion, ChatCompletionChunk),
        ("/v1/completions", {**TEXT, "logprobs": 2}, Completion, None),
        ("/v1/embeddings", {"model": "embed", "input": ["a", "b"]}, CreateEmbeddingResponse, None),
    ],
    ids=["chat", "completion", "embeddings"],
)
def test_answers_of_the_older_routes_are_as_published(able_http, path, body, kind, piece):
    check(kind, able_http.post(path, json=body).json())
    if piece is not None:
        events = able_http.post(path, json={**body, "stream": True}).text.replace("data: [DONE]", "")
        for line in filter(None, events.splitlines()):
            check(piece, json.loads(line.removeprefix("data: ")))


def test_ids_are_written_as_published(able_http):
    response = able_http.post("/v1/responses", json={**RESPONSE, **RESPONSES["calls"]}).json()
    version = {"anthropic-version": "2023-06-01"}
    message = able_http.post("/v1/messages", json={**MESSAGE, **MESSAGES["calls"]}, headers=version).json()
    call = next(item for item in response["output"] if item["type"] == "function_call")
    used = next(block for block in message["content"] if block["type"] == "tool_use")
    found = [response["id"], call["id"], call["call_id"], message["id"], used["id"]]
    assert [name.partition("_")[0] for name in found] == ["resp", "fc", "call", "msg", "toolu"]


LOOSE = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_schema_that_cannot_be_enforced_is_loosened_unless_its_tool_is_strict(able_http, strict):
    version = {"anthropic-version": "2023-06-01"}
    function = {"type": "function", "name": "add", "parameters": LOOSE, "strict": strict}
    used = {"name": "add", "input_schema": LOOSE, "strict": strict}
    for answer, own in (
        (able_http.post("/v1/responses", json={**RESPONSE, "tools": [function]}), "parameters"),
        (able_http.post("/v1/messages", json={**MESSAGE, "tools": [used]}, headers=version), "input_schema"),
    ):
        assert answer.status_code == (400 if strict else 200)
        if strict:
            assert answer.json()["error"]["message"].startswith(
                f"tools[0].{own} has the keyword 'uniqueItems' at #/pro"
            )
        else:
            assert answer.headers["x-llmc-ignored"] == f"tools[0].{own}.properties.a.uniqueItems"
