"""Forms of answers in each dialect: beside tools, and refused by the name that the client wrote."""

import json
from typing import Any

import jsonschema
import pytest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"const": "<|im_end|>\u2028"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"model": "able", "temperature": 0, "messages": [{"role": "user", "content": "Add."}]}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
HEADERS = {"anthropic-version": "2023-06-01"}


def make_body(path: str, **more: Any) -> dict[str, Any]:
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {**ASKED, most: 100, **more}
    if path in (RESPONSES, COMPLETIONS):
        del body["messages"]
        body["input" if path == RESPONSES else "prompt"] = "Add."
    return body


def make_form(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The dialect's own word for the form of an answer."""
    if path == CHAT:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    if path == RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def make_tools(path: str, choice: str) -> dict[str, Any]:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "b": {"type": "null"}}}
    if path == MESSAGES:
        kind = {"type": "any" if choice == "required" else choice}
        return {"tools": [{"name": "add", "input_schema": schema}], "tool_choice": kind}
    function = {"name": "add", "parameters": schema}
    tool = {"type": "function", **function} if path == RESPONSES else {"type": "function", "function": function}
    return {"tools": [tool], "tool_choice": choice}


def read_answer(path: str, answer: dict[str, Any]) -> tuple[str, Any]:
    """The text of an answer, or the arguments of its call."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        if message.get("tool_calls"):
            return "", json.loads(message["tool_calls"][0]["function"]["arguments"])
        return message["content"], None
    if path == RESPONSES:
        item = next(item for item in answer["output"] if item["type"] != "reasoning")
        is_call = item["type"] == "function_call"
        return ("", json.loads(item["arguments"])) if is_call else (item["content"][0]["text"], None)
    block = next(block for block in answer["content"] if block["type"] != "thinking")
    return ("", block["input"]) if block["type"] == "tool_use" else (block["text"], None)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("choice", ["auto", "required", None])
def test_calls_hold_to_their_schemas_and_texts_to_the_form(able_http, path, choice):
    body = make_body(path, **make_form(path, SCHEMA), **(make_tools(path, choice) if choice else {}))
    answer = able_http.post(path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    text, arguments = read_answer(path, answer.json())
    if choice == "required" or arguments is not None:
        assert arguments["b"] is None and 0 <= arguments["a"] <= 9
    else:
        jsonschema.validate(json.loads(text), SCHEMA)
    streamed = able_http.post(path, json={**body, "stream": True}, headers=HEADERS).text
    for line in streamed.splitlines():  # httpx's own way, for which U+2028 ends a line
        assert not line or line.startswith((":", "event: ", "data: ")), line
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
    pieces += [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
    pieces += [event["delta"].get("text", "") for event in events if event.get("type") == "content_block_delta"]
    assert "".join(pieces) == text


_WRONG: dict[str, Any] = {"not": {}}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, make_form(CHAT, _WRONG), "response_format"),
    (CHAT, {"response_format": {"type": "json_object", "schema": _WRONG}}, "response_format"),
    (CHAT, {"response_format": {"type": "grammar", "grammar": "root ::= x"}}, "response_format"),
    (CHAT, {"json_schema": _WRONG}, "json_schema"),
    (CHAT, {"structured_outputs": {"json": _WRONG}}, "structured_outputs.json"),
    (CHAT, {"structured_outputs": {"regex": "a{20000}"}}, "structured_outputs.regex"),
    (RESPONSES, make_form(RESPONSES, _WRONG), "text.format.schema"),
    (RESPONSES, {"json_schema": _WRONG}, "json_schema"),
    (MESSAGES, make_form(MESSAGES, _WRONG), "output_config.format.schema"),
    (MESSAGES, {"structured_outputs": {"json": _WRONG}}, "structured_outputs.json"),
    (COMPLETIONS, {"structured_outputs": {"json": _WRONG}}, "structured_outputs.json"),
    (COMPLETIONS, {"grammar": "root ::= x"}, "grammar"),
]


@pytest.mark.parametrize(("path", "form", "name"), NAMED, ids=range(len(NAMED)))
def test_a_refused_form_has_the_name_that_the_client_wrote(able_http, path, form, name):
    for tools in ({}, make_tools(path, "auto") if path != COMPLETIONS else {}):
        answer = able_http.post(path, json=make_body(path, **form, **tools), headers=HEADERS)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["message"].startswith(name) and error.get("param", name) == name, error


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_form_that_may_begin_like_a_call_is_refused_by_its_name(able_http, path):
    is_chat = path == CHAT
    form = {"response_format": {"type": "json_object"}} if is_chat else {"text": {"format": {"type": "json_object"}}}
    body = make_body(path, **form, **make_tools(path, "auto"), tool_format="llama3")
    error = able_http.post(path, json=body).json()["error"]
    assert error["param"] == ("response_format" if is_chat else "text.format")
    assert error["message"].startswith(f"{error['param']} is given beside tools")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_compact_json_has_no_white_space(able_http, path):
    form = {"structured_outputs": {"json": {**SCHEMA, "required": ["a"]}, "disable_any_whitespace": True}}
    for more in (form, {**make_form(path, SCHEMA), "compact_json": True}):
        text, _ = read_answer(path, able_http.post(path, json=make_body(path, **more), headers=HEADERS).json())
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
