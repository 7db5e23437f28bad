"""Refusals name the parameter as the client wrote it, in words of the API's."""

import json
import re
from typing import Any

import numpy as np
import pytest
from doubles.asgi import Echo, ask
from pydantic import ValidationError

from llmc.errors import NonFiniteError
from llmc.runtime.sampling.logits import weigh
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects.anthropic import MessageRequest
from llmc.runtime.server.dialects.completions import CompletionRequest
from llmc.runtime.server.dialects.openai_chat import ChatRequest
from llmc.runtime.server.dialects.responses import ResponseRequest
from llmc.runtime.server.http.arrival import Bodies
from llmc.runtime.server.http.errors import from_llmc

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
        "json_schema", "bad_words", "stop_token_ids", "priority", "deadline_s", "structured_outputs", "unknown",
        "num_beams", "consensus", "speculate", "on_overflow", "typical_p", "mirostat", "mirostat_tau",
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
]  # fmt: skip


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "default": 1e999}}}
ANSWERED = {"role": "assistant", "content": [{"type": "output_text", "text": "b", "logprobs": [1e999]}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1e999}}]}
ASKED = {"model": "tiny", "max_tokens": 1, "messages": [USER]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}, "tools[0]"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, "text"),
        (MESSAGES, {**ASKED, "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tools[0]"),
        (MESSAGES, {**ASKED, "messages": [USER, USED]}, "messages[1]"),
        (MESSAGES, {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config"),
    ],
)
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused_at_their_place(http, path, body, param, number):
    text = json.dumps(body).replace("Infinity", number)
    answer = http.post(path, content=text, headers={**VERSION, "content-type": "application/json"})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said.startswith(param) and said.endswith("expected a finite number")


def test_numbers_that_json_has_not_may_be_in_what_is_not_read(http):
    text = json.dumps({"input": [USER, ANSWERED, USER], "max_output_tokens": 1})
    assert http.post(RESPONSES, content=text, headers={"content-type": "application/json"}).status_code == 200


def test_no_sentence_speaks_of_python(http):
    said = set()
    for path, body in CORPUS[::12]:  # of 13 values each, so each value comes
        if body.get("stream") is True or body.get("logprobs") is True:
            continue
        answer = http.post(path, json={"max_tokens": 1, **body} if path == CHAT else body, headers=VERSION)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            said.add(answer.json()["error"]["message"])
    assert len(said) > 25 and max(map(len, said)) < 600
    assert [sentence for sentence in said if PYTHON.search(re.sub(r"'[^']*'", "", sentence))] == []


def test_a_word_of_python_would_be_noticed():
    assert (
        PYTHON.search("top_p is None")
        and PYTHON.search("expected a valid dictionary")
        and not PYTHON.search("nonetheless")
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        (RESPONSES, {"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include": True}, "stream": True}, "stream_options.include"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        (CHAT, {"messages": [USER], "num_beams": 2, "n": 2}, "n"),
        (CHAT, {"messages": [USER], "length_penalty": 2.0}, "length_penalty"),
        (CHAT, {"messages": [USER], "regex": "a", "choice": ["a"]}, "regex"),
        (CHAT, {"messages": [USER], "json_schema": {"a": None}}, "json_schema"),
        (CHAT, {"messages": [USER], "logit_bias": {"5": 101}}, "logit_bias.5"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"message": 1}}, "chat_template_kwargs"),
        (f"{CHAT}?temperature=0", {"messages": [USER]}, "temperature"),
        ("/v1/responses?store=false", {"input": "a"}, "store"),
    ],
)
def test_a_place_is_named_as_it_was_written(http, path, body, param):
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
def test_a_body_that_is_none_is_told_apart(http, body, said):
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_texts_of_two_names_are_not_sent_back_whole(http):
    thoughts = {"reasoning_content": "a" * 10_000, "reasoning": "b" * 10_000}
    answer = http.post(CHAT, json={"messages": [USER, {"role": "assistant", "content": "c", **thoughts}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[1].reasoning"
    assert "give one of them" in error["message"] and len(error["message"]) < 1000


@pytest.mark.parametrize("name", ["query", "body", "header", "path"])
def test_a_parameter_may_have_the_name_of_a_part_of_a_request(http, name):
    error = http.post(CHAT, json={"messages": [USER], name: 1}).json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name} is not a parameter of this route")


def test_what_other_servers_call_otherwise_is_refused_with_llmcs_name(http):
    answer = http.post(CHAT, json={"messages": [USER], "repeat_penalty": 1.1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "repeat_penalty"
    assert answer.json()["error"]["message"].endswith("leave it out, or did you mean repetition_penalty?")


@pytest.mark.threat("json-cost")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1] * 9999 + ["x"]}),
        (CompletionRequest, {"prompt": [True] * 9999}),
        (ChatRequest, {"messages": [{"role": 1}] * 9999}),
        (ChatRequest, {"messages": [USER], "logit_bias": {str(number): "x" for number in range(9999)}}),
        (ChatRequest, {"messages": [{**USER, **{str(number): 1 for number in range(9999)}}]}),
        (ResponseRequest, {"input": [{"type": "message", "role": "user", "content": [{}] * 9999}] * 9}),
        (MessageRequest, {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 9999}]}),
    ],
)
def test_a_body_ends_at_its_first_fault(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 9  # one of each kind of value, and each member that is missing


@pytest.mark.threat("json-cost")
def test_a_name_that_an_object_has_twice_is_refused():
    app = Bodies(Echo(), ServerConfig(models={}))
    body = b'{"messages": [{"content": "a", "content": "b"}]}'
    refused = ask(app, CHAT, method="POST", headers={"content-length": str(len(body))}, body=[body])
    assert refused.status == 400 and refused.json["error"]["param"] == "content"
    assert "content is given twice" in refused.json["error"]["message"]
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
def test_what_exceeds_the_context_has_its_code(http, path, body, param):
    error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_an_empty_list_of_blocks_is_told_as_such(http):
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": []}]}
    answer = http.post(MESSAGES, json=body, headers=VERSION)
    assert answer.json()["error"]["message"] == "messages[0].content is empty, expected 1 or more items"


@pytest.mark.threat("no-fetch")
def test_another_spelling_of_a_route_leads_nowhere_else(http):
    assert http.post(f"{CHAT}/", json={}, follow_redirects=False).status_code == 404


def test_clients_of_anthropics_beta_resources_go_on_working(http):
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER]}
    assert http.post(f"{MESSAGES}?beta=true", json=body, headers=VERSION).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status"), [("Application/JSON; charset=utf-8", 200), ("application/vnd.api+json", 200), ("", 400)]
)
def test_a_body_is_json_by_any_of_its_names(http, kind, status):
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == status


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings"])
def test_parameters_in_the_address_are_refused_everywhere(http, path):
    answer = http.post(f"{path}?invented=1", json={}, headers=VERSION)
    assert answer.status_code == 400 and "invented" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (CHAT, {"messages": [USER], "stream": True}),
        (COMPLETIONS, {"prompt": "a"}),
        (RESPONSES, {"input": "a"}),
        (f"{RESPONSES}/input_tokens", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/models/other", None),
    ],
)
def test_a_missing_model_is_named_as_openai_does(http, path, body):
    answer = http.get(path) if body is None else http.post(path, json={"model": "other", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        404, "invalid_request_error", "model_not_found", "model")  # fmt: skip


@pytest.mark.parametrize("body", [{}, {"model": "tiny", "input": []}])
def test_responses_are_not_compacted(http, body):
    answer = http.post(f"{RESPONSES}/compact", json=body)
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_the_servers_fault(value):
    with pytest.raises(NonFiniteError) as caught:
        weigh(np.full(9, value, np.float32))
    assert from_llmc(caught.value).status == 500
