"""OpenAI's chat completions through the official client: texts, tools, reasoning and streams."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from doubles.serving import retold, serving
from doubles.speaking import speak

from llmc.runtime import Model
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects.openai_chat import EFFORTS, add_variables
from llmc.runtime.server.http.errors import ApiError
from llmc.runtime.server.http.guarded import Guarded
from llmc.runtime.text.chat_template import ChatTemplate

MESSAGES: Any = [{"role": "user", "content": "Write a function."}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "subtract"}}
ALLOWED: dict[str, Any] = {"type": "allowed_tools"}
FORMAT = {"tool_format": "hermes"}  # the small model's template knows none
CALLED: dict[str, Any] = {
    **GREEDY,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 128,
    "extra_body": FORMAT,
}


def test_the_answer_is_that_of_the_engine(client, model):
    answer = client.chat.completions.create(**GREEDY)
    wanted = model.chat(MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage is not None and answer.usage.total_tokens == wanted.usage.total_tokens
    assert answer.system_fingerprint is not None


def test_a_stream_joins_to_the_whole(client):
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert content == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_content_in_parts_and_developers_are_read(client, model):
    parts: Any = [{"type": "text", "text": "Write "}, {"type": "text", "text": "a function."}]
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(**{**GREEDY, "messages": messages})
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a function."}]
    assert answer.choices[0].message.content == model.chat(plain, max_tokens=12, temperature=0).text


def test_logprobs_come_with_the_bytes_of_tokens(client):
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelt = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert spelt.startswith(answer.choices[0].message.content or "?")
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    chunks = client.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **GREEDY)
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert streamed == logprobs.content


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9, "minimum": 1}},
        },
        {"type": "grammar", "grammar": 'root ::= "[1]"'},
    ],
    ids=lambda wanted: wanted["type"],
)
def test_the_answer_has_the_form_that_was_asked_for(client, wanted):
    answer = client.chat.completions.create(**{**GREEDY, "max_tokens": 200, "response_format": wanted})
    if answer.choices[0].finish_reason == "stop":
        json.loads(answer.choices[0].message.content or "")
    else:
        assert wanted["type"] == "json_object"


def test_a_required_call_follows_the_schema_of_its_tool(client):
    answer = client.chat.completions.create(**CALLED)
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or [None]:
        assert call.type == "function" and call.function.name == "add"
        assert json.loads(call.function.arguments)["a"] in range(10)


def test_a_call_is_streamed_as_deltas(client):
    whole = client.chat.completions.create(**CALLED).choices[0].message.tool_calls
    name, arguments = "", ""
    for chunk in client.chat.completions.create(stream=True, **CALLED):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                if call.index == 0:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    assert whole and (name, arguments) == ("add", whole[0].function.arguments)


def test_calls_and_results_that_the_template_does_not_show_are_refused(client):
    asked = client.chat.completions.create(**CALLED).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "3"}  # type: ignore[index]
    messages = [*MESSAGES, asked.model_dump(exclude_none=True), result]
    with pytest.raises(openai.BadRequestError, match="messages holds tool_calls, which the model's chat template does"):
        client.chat.completions.create(**{**GREEDY, "messages": messages})
    # Where the client names their format they are written so.
    assert client.chat.completions.create(**{**CALLED, "messages": messages, "tool_choice": "none"}).choices


@pytest.mark.threat("honest-parameters")
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"web_search_options": {}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "none"}, "tools"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template_kwargs": {"custom": 1}}, "chat_template_kwargs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"functions": [{"name": "add"}]}, "functions"),
        (
            {"tools": [TOOL], "tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            "tool_choice",
        ),
        ({"verbosity": "loud"}, "verbosity"),
        ({"safety_identifier": "one\ntwo"}, "safety_identifier"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}]},
            "messages[0].content[0].foo",
        ),
        ({"reasoning_effort": "loud"}, "reasoning_effort"),
        ({"reasoning_budget": 8}, "reasoning_budget"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "a"}}}},
            "response_format",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(http, given, param):
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **given})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith(param) and error["type"] == "invalid_request_error"


@pytest.mark.threat("honest-parameters")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"store": True, "service_tier": "flex"}, "service_tier, store"),
        ({"parallel_tool_calls": False, "tools": []}, "parallel_tool_calls"),
        ({"messages": [{**MESSAGES[0], "name": "Ann"}]}, "messages.name"),
        *(({"reasoning_effort": effort}, "reasoning_effort") for effort in EFFORTS),
        ({"reasoning_effort": "none"}, None),
        ({"verbosity": "low"}, "verbosity"),
        ({"verbosity": "medium"}, None),
        ({"chat_template_kwargs": {"thinking": True, "verbosity": "low"}}, "thinking, verbosity"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"add_generation_prompt": True, "max_completion_tokens": -1, "max_tokens": 12}, None),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"functions": None, "function_call": None, "audio": None, "web_search_options": None}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"],
                                                     "cache_control": {"type": "ephemeral"}}]}]}, "cache_control"),
    ],
)  # fmt: skip
def test_what_cannot_change_the_answer_is_accepted_and_named(http, given, names):
    plain = http.post("/v1/chat/completions", json=GREEDY)
    unbounded = {name: value for name, value in given.items() if name != "max_completion_tokens"}
    answer = http.post("/v1/chat/completions", json={**GREEDY, **unbounded})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]
    found = answer.headers.get("x-llmc-ignored")
    assert (found and ", ".join(sorted(found.split(", ")))) == names


@pytest.mark.threat("honest-parameters")
def test_what_an_answer_carried_may_come_back(able_http, able_openai):
    asked = able_openai.chat.completions.create(**{**CALLED, "model": "able"}).choices[0].message
    assert asked.tool_calls and asked.tool_calls[0].id.startswith("call_")
    said = {**asked.model_dump(), "provider_specific_fields": {"a": 1}, "reasoning_content": "Hm."}
    said["tool_calls"] = [{**call, "index": 0} for call in said["tool_calls"]]
    said["tool_calls"][0]["function"]["parsed_arguments"] = {"a": 1}
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": [{"type": "text", "text": "3"}]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": []}
    also = {"role": "assistant", "content": None, "refusal": "No."}
    before = [*MESSAGES, said, result]
    asks = [{**GREEDY, "model": "able", "messages": [*before, each, *MESSAGES]} for each in (
        refused, also, {"role": "assistant", "content": "No."})]  # fmt: skip
    answers = [able_http.post("/v1/chat/completions", json=body) for body in asks]
    assert [answer.status_code for answer in answers] == [200] * 3
    found = [(answer.json()["choices"], answer.json()["usage"]["prompt_tokens"]) for answer in answers]
    assert found[0] == found[1] == found[2]


PLACE = "tools[0].function.parameters"
# As pydantic and zod write them.
LOOSE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Args",
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9, "title": "A", "default": 1},
        "tags": {"type": "array", "items": {"type": "string", "format": "idn-email"}, "uniqueItems": True},
        "by": {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": {"type": "string"}},
        "price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)[0-9]+$"}]},
        "one": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    },
    "required": ["a"],
}


@pytest.mark.threat("tool-schemas")
def test_a_tool_that_need_not_be_called_may_have_rules_that_cannot_be_enforced(able_http):
    def ask(strict: bool = False, **given: Any) -> httpx.Response:
        tool = {"type": "function", "function": {"name": "add", "parameters": LOOSE, "strict": strict}}
        return able_http.post("/v1/chat/completions", json={**GREEDY, "model": "able", "tools": [tool], **given})

    answer = ask()
    assert answer.status_code == 200, answer.text
    named = {name.removeprefix(f"{PLACE}.properties.") for name in answer.headers["x-llmc-ignored"].split(", ")}
    assert named == {
        "tags.uniqueItems", "by.propertyNames", "tags.items.format", "price.anyOf.1.pattern", "one.oneOf"
    }  # fmt: skip
    for refused in (ask(strict=True), ask(tool_choice="required")):
        error = refused.json()["error"]
        assert refused.status_code == 400 and "cannot be enforced" in error["message"]
        assert error["param"] == PLACE and error["message"].startswith(f"{PLACE} ")


def test_a_call_that_a_stop_text_breaks_off_is_text_in_every_dialect(able_http):
    tool, asked = TOOL["function"], {**GREEDY, "model": "able", "max_tokens": 100}
    schema = tool["parameters"]
    chat = {**asked, "tools": [TOOL], "tool_choice": "required", "stop": ['"a"']}
    (choice,) = able_http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    said = choice["message"]["content"]
    assert said.startswith("<tool_call>") and '"add"' in said
    streamed = able_http.post("/v1/chat/completions", json={**chat, "stream": True}).text
    assert '"finish_reason": "stop"' in streamed.replace('":"', '": "') and "tool_calls" not in streamed
    named = {"name": "add", "input_schema": schema}
    body = {"model": "able", "messages": GREEDY["messages"], "max_tokens": 100, "temperature": 0}
    body |= {"tools": [named], "tool_choice": {"type": "any"}, "stop_sequences": ['"a"']}
    message = able_http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}).json()
    assert (message.get("stop_reason"), message.get("stop_sequence")) == ("stop_sequence", '"a"'), message
    assert [block.get("text") for block in message["content"]] == [said]
    called = {"model": "able", "input": GREEDY["messages"], "tools": [{"type": "function", **tool}], "stop": ['"a"']}
    response = able_http.post("/v1/responses", json={**called, "tool_choice": "required", "temperature": 0}).json()
    assert response["status"] == "completed"
    assert [part["text"] for item in response["output"] for part in item["content"]] == [said]


def test_the_length_of_answers_is_told_to_models_whose_template_shows_it(able_http):
    def prompt_tokens(**given: Any) -> int:
        body = {"model": "able", "messages": MESSAGES, "max_tokens": 1, **given}
        return int(able_http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    told = prompt_tokens(verbosity="low")
    assert told > prompt_tokens()
    assert told == prompt_tokens(chat_template_kwargs={"verbosity": "low"})
    body = {"model": "able", "messages": MESSAGES, "verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}
    refused = able_http.post("/v1/chat/completions", json=body).json()["error"]
    assert refused["param"] == "chat_template_kwargs" and "contradicts verbosity" in refused["message"]


def test_the_usage_tells_the_tokens_of_thoughts(able_openai, able_http):
    given: dict[str, Any] = {**GREEDY, "model": "able", "max_tokens": 160, "reasoning_effort": "minimal"}
    usage = able_openai.chat.completions.create(**given).usage
    responses = {"model": "able", "input": MESSAGES, "max_output_tokens": 160, "reasoning": {"effort": "minimal"}}
    same = able_http.post("/v1/responses", json={**responses, "temperature": 0}).json()["usage"]
    assert usage and usage.completion_tokens_details
    thoughts = usage.completion_tokens_details.reasoning_tokens
    assert thoughts == same["output_tokens_details"]["reasoning_tokens"] > 0
    *_, last = able_openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given)
    assert last.usage == usage
    without = able_openai.chat.completions.create(**{**GREEDY, "model": "able"}).usage
    assert without and without.completion_tokens_details and without.completion_tokens_details.reasoning_tokens == 0


ALWAYS = "<think>{{ messages }}</think>"
NAMED_EFFORT = "{{ reasoning_effort }}" + ALWAYS
PICKY = NAMED_EFFORT + "{% if reasoning_effort not in ('none', 'high') %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "effort", "variables", "ignored"),
    [
        ("{{ messages }}", "high", None, True),
        ("{{ messages }}", "none", None, False),
        ("{{ reasoning_effort }}{{ messages }}", "low", {"reasoning_effort": "low"}, False),
        ("{{ enable_thinking }}<think></think>", "max", {"enable_thinking": True}, False),
        (ALWAYS, "high", None, False),
        (ALWAYS, "none", None, True),
        (NAMED_EFFORT, "none", None, True),
        (NAMED_EFFORT, "minimal", {"reasoning_effort": "minimal"}, False),
        (PICKY, "none", {"reasoning_effort": "none"}, False),
        (PICKY, "low", None, False),  # the budget is what it comes to
    ],
)
def test_effort_is_a_hint_that_a_template_follows_or_not(template, effort, variables, ignored):
    named: list[str] = []
    model: Any = SimpleNamespace(chat_template=ChatTemplate({"default": template}, {}))
    model.reasoning_variables = partial(Model.reasoning_variables, model)
    assert add_variables(model, {}, effort, None, False, named.append, effort_name="effort") == variables
    assert named == ["effort"] * ignored


def test_a_given_effort_and_another_one_contradict():
    model: Any = SimpleNamespace(chat_template=ChatTemplate({"default": NAMED_EFFORT}, {}))
    model.reasoning_variables = partial(Model.reasoning_variables, model)
    with pytest.raises(ApiError, match="contradicts reasoning_effort"):
        add_variables(model, {"reasoning_effort": "high"}, "low", None, False, pytest.fail)


@pytest.mark.parametrize("given", [{"num_beams": 2}, {"continue_final_message": True}])
def test_an_effort_without_room_for_thoughts_is_ignored_and_a_budget_refused(able_http, given):
    messages = [*MESSAGES, {"role": "assistant", "content": "So"}][: 2 if "continue_final_message" in given else 1]
    body = {"model": "able", "messages": messages, "max_tokens": 2, "temperature": 0, **given}
    answer = able_http.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-llmc-ignored"] == "reasoning_effort"
    assert (
        able_http.post(
            "/v1/chat/completions", json={**body, "reasoning_budget": 8, "enable_thinking": True}
        ).status_code
        == 400
    )


HARMONY_MARKS = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "call", "constrain")]
THOUGHT = "<|channel|>analysis<|message|>How many?<|end|><|start|>assistant<|channel|>"


@pytest.mark.parametrize(
    ("said", "content", "called", "reason"),
    [
        (f"{THOUGHT}final<|message|>Seven.", "Seven.", [], "stop"),
        (
            f'{THOUGHT}commentary to=functions.add <|constrain|>json<|message|>{{"a": 7}}',
            None,
            [("add", '{"a": 7}')],
            "tool_calls",
        ),
    ],
    ids=["text", "call"],
)
def test_a_stream_of_harmony_joins_to_the_whole(harmony, monkeypatch, said, content, called, reason):
    """A stand-in for gpt-oss: the small model with its template, made to say what it would say."""
    stream_chat = Model.stream_chat
    monkeypatch.setattr(
        Model, "stream_chat", lambda self, *a, **k: stream_chat(self, *a, **k, logits_processors=speak(self, said))
    )
    asked: dict[str, Any] = {**GREEDY, "tools": [TOOL], "max_tokens": 300}
    whole = harmony.chat.completions.create(**asked).choices[0]
    message = whole.message
    assert (message.content, message.reasoning_content) == (content, "How many?")  # type: ignore[attr-defined]
    calls = [call.function for call in message.tool_calls or [] if call.type == "function"]
    assert ([(call.name, call.arguments) for call in calls], whole.finish_reason) == (called, reason)

    found = [chunk.choices[0] for chunk in harmony.chat.completions.create(stream=True, **asked)]
    deltas = [choice.delta for choice in found]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    texts = [delta.content or "" for delta in deltas]
    pieces = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
    assert ("".join(thoughts), "".join(texts), found[-1].finish_reason) == ("How many?", content or "", reason)
    assert sum(map(bool, thoughts)) > 1 and sum(map(bool, (*texts, *pieces))) > 1
    assert "".join(piece.arguments or "" for piece in pieces) == "".join(given for _, given in called)
    assert [piece.name for piece in pieces if piece.name] == [name for name, _ in called]


@pytest.fixture(scope="module")
def harmony(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of the small model with a template like that of gpt-oss."""
    template = (Path(__file__).parents[2] / "text" / "templates" / "harmony.jinja").read_text("utf-8")
    bundle = retold(tiny_bundle, tmp_path_factory.mktemp("harmony") / "bundle", template, HARMONY_MARKS)
    with (
        serving(ServerConfig(models={"tiny": bundle}, threads=1), Guarded) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
