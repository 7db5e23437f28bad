"""Refusals name the parameter as the client wrote it, in words of the API's."""

import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from doubles.asgi import Echo, ask, converse

from llmc.runtime.server.chat import ChatRequest
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.errors import ApiError, in_json
from llmc.runtime.server.guard.bodies import Bodies
from llmc.runtime.server.validation import read_json

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
VERSION = {"anthropic-version": "2026-10-21"}
USER = {"role": "user", "content": "a"}
# Words that whoever writes another language than Python need not know.
PYTHON = re.compile(
    r"\b(tuple|NoneType|None|True|False|dict|dictionary|str|int|float|bool|bytes|mapping|kwarg|repr|pydantic|instance)\b"
    r"|tagged-union|<class|Path\(|Error\("
)
# Values that no parameter, or hardly any, can have.
ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**400, "", "x", [], [None], [[]], {}, {"a": None}, [{"type": "x"}])
CORPUS = [
    *((CHAT, {"messages": [USER], name: value}) for name in (
        "model", "max_tokens", "stop", "n", "best_of", "logprobs", "top_logprobs", "logit_bias", "response_format",
        "stream", "stream_options", "tools", "tool_choice", "tool_format", "reasoning_effort", "reasoning_budget",
        "chat_template_kwargs", "documents", "user", "temperature", "top_p", "seed", "regex", "grammar", "choice",
        "json_schema", "bad_words", "stop_token_ids", "sequence_bias", "priority", "deadline_s", "x_llmc", "unknown",
        "num_beams", "consensus", "mirostat", "speculate", "on_overflow",
    ) for value in ODD),
    *((CHAT, {"messages": value}) for value in ODD),
    *((CHAT, {"messages": [{**USER, name: value}]})
      for name in ("role", "content", "name", "tool_calls") for value in ODD),
    *((COMPLETIONS, {"prompt": value}) for value in ODD),
    *((RESPONSES, {"input": value}) for value in ODD),
    *((RESPONSES, {"input": "a", name: value}) for name in ("text", "tools", "include", "metadata") for value in ODD),
    *((MESSAGES, {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": value}]})
      for value in ODD),
    *((MESSAGES, {"model": "tiny", "max_tokens": 1, "messages": [USER], name: value})
      for name in ("system", "tools", "tool_choice", "thinking", "output_config", "metadata") for value in ODD),
    *(("/tokenize", {name: value}) for name in ("prompt", "messages") for value in ODD),
    *(("/detokenize", {"tokens": value}) for value in ODD),
]  # fmt: skip


def test_no_sentence_speaks_of_python(http: httpx.Client):
    said = set()
    for path, body in CORPUS:
        if body.get("stream") is True or body.get("logprobs") is True:
            continue
        answer = http.post(path, json={"max_tokens": 1, **body} if path == CHAT else body, headers=VERSION)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            said.add(answer.json()["error"]["message"])
    assert len(said) > 100 and max(map(len, said)) < 600
    assert [sentence for sentence in said if PYTHON.search(re.sub(r"'[^']*'", "", sentence))] == []


def test_a_word_of_python_would_be_noticed():
    assert (
        PYTHON.search("top_p is None")
        and PYTHON.search("expected a valid dictionary")
        and not PYTHON.search("nonetheless")
    )


def test_what_stands_in_quotes_stays():
    assert (
        in_json("speculate is True, but 'True' is None, or a NoneType")
        == "speculate is true, but 'True' is null, or null"
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include": True}, "stream": True}, "stream_options.include"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
        (RESPONSES, {"input": "a", "stream_options": {}}, "stream_options"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        (CHAT, {"messages": [USER], "num_beams": 2, "n": 2}, "n"),
        (CHAT, {"messages": [USER], "length_penalty": 2.0}, "length_penalty"),
        (CHAT, {"messages": [USER], "regex": "a", "choice": ["a"]}, "regex"),
        (CHAT, {"messages": [USER], "json_schema": {"a": None}}, "json_schema"),
        (CHAT, {"messages": [USER], "logit_bias": {"5": 101}}, "logit_bias"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"message": 1}}, "chat_template_kwargs"),
        ("/apply-template", {"messages": [USER], "documents": [{}]}, "documents"),
        (f"{CHAT}?temperature=0", {"messages": [USER]}, "temperature"),
        ("/v1/responses?store=false", {"input": "a"}, "store"),
    ],
)
def test_a_place_is_named_as_it_was_written(http: httpx.Client, path: str, body: dict[str, Any], param: str):
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty, expected a JSON object"),
        (b'{"messages": "\xff"}', "the body cannot be read, expected a JSON object in UTF-8"),
        (b"[]", "the body is no JSON object"),
        (b"{", "the body is no JSON"),
    ],
)
def test_a_body_that_is_none_is_told_apart(http: httpx.Client, body: bytes, said: str):
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_texts_of_two_names_are_not_sent_back_whole(http: httpx.Client):
    thoughts = {"reasoning_content": "a" * 10_000, "reasoning": "b" * 10_000}
    answer = http.post(CHAT, json={"messages": [USER, {"role": "assistant", "content": "c", **thoughts}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[1].reasoning"
    assert "give one of them" in error["message"] and len(error["message"]) < 1000


@pytest.mark.parametrize("name", ["query", "body", "header", "path"])
def test_a_message_of_a_socket_is_told_of_a_parameter_that_is_named_as_a_part_of_a_request(name: str):
    with pytest.raises(ApiError, match=f"^{name} is not a parameter of this route") as refused:
        read_json(ChatRequest, json.dumps({"messages": [USER], name: 1}))
    assert refused.value.param == name


def test_a_name_that_an_object_has_twice_is_refused():
    app = Bodies(Echo(), ServerConfig(models={}))
    body = b'{"messages": [{"content": "a", "content": "b"}]}'
    refused = ask(app, CHAT, method="POST", headers={"content-length": str(len(body))}, body=[body])
    assert refused.status == 400 and refused.json["error"]["param"] == "content"
    assert "content is given twice" in converse(app, [body.decode()]).messages[1]["text"]
    once = json.dumps({"a": {"content": 1}, "b": {"content": 1}}).encode()
    assert ask(app, CHAT, method="POST", headers={"content-length": str(len(once))}, body=[once]).status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
        (COMPLETIONS, {"prompt": "a " * 5000}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, "prompt"),
        (RESPONSES, {"input": "a " * 5000}, "input"),
    ],
)
def test_what_exceeds_the_context_has_its_code(http: httpx.Client, path: str, body: dict[str, Any], param: str):
    error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_an_empty_list_of_blocks_is_told_as_such(http: httpx.Client):
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": []}]}
    answer = http.post(MESSAGES, json=body, headers=VERSION)
    assert answer.json()["error"]["message"] == "messages[0].content is empty, expected 1 or more items"


def test_another_spelling_of_a_route_leads_nowhere_else(http: httpx.Client):
    assert http.post(f"{CHAT}/", json={}, follow_redirects=False).status_code == 404


def test_biases_of_sequences_are_taken(http: httpx.Client):
    body = {"messages": [USER], "max_tokens": 1, "sequence_bias": [[[5], 0.5]], "x_llmc": {"resolved": True}}
    assert http.post(CHAT, json=body).json()["x_llmc"]["resolved"]["sequence_bias"] == [[[5], 0.5]]


def test_clients_of_anthropics_beta_resources_go_on_working(http: httpx.Client):
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
    assert http.post(f"{MESSAGES}?beta=true", json=body, headers=VERSION).status_code == 200
