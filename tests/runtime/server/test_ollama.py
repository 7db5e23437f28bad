"""Ollama's dialect over plain HTTP: what its clients send, and what they need back."""

import json

import httpx2 as httpx
import pytest

from llmc.runtime.api.chat import Message, ToolCall
from llmc.runtime.server.ollama import calls_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f("}], "options": {"num_predict": 6, "seed": 1}}


@pytest.fixture(scope="module")
def able(able_bundle):
    from doubles.serving import serving

    from llmc.runtime.server.config import ServerConfig
    from llmc.runtime.server.http.guarded import Guarded

    with serving(ServerConfig(models={"tiny": able_bundle}, threads=1), Guarded) as url:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client


def lines(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_stream_of_lines_says_what_the_whole_answer_says(able):
    pieces = lines(able.post("/api/chat", json=CHAT))
    whole = able.post("/api/chat", json=CHAT | {"stream": False}).json()
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 6)
    assert whole["prompt_eval_count"] > 0 and whole["total_duration"] >= whole["eval_duration"] > 0
    openai = able.post("/v1/chat/completions", json={"messages": CHAT["messages"], "max_tokens": 6, "seed": 1}).json()
    assert whole["message"]["content"] == openai["choices"][0]["message"]["content"]


def test_a_call_and_its_result_go_round(able):
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    turns = [*CHAT["messages"], said, {"role": "tool", "content": "2", "tool_name": "add"}]
    answer = able.post("/api/chat", json=CHAT | {"messages": turns, "tools": [tool], "stream": False})
    assert answer.status_code == 200, answer.text


def test_a_schema_is_kept(able):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = able.post("/api/chat", json={**CHAT, "stream": False, "format": schema, "options": {"seed": 1}}).json()
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)


@pytest.mark.parametrize(
    "sampling",
    [{"mirostat": 2, "mirostat_tau": 9.0, "mirostat_eta": 0.9}, {"mirostat": 1}, {"typical_p": 0.2}],
    ids=str,
)
def test_samplers_of_its_options_are_those_of_the_other_dialects(able, sampling):
    def ask(**options) -> str:
        asked = CHAT | {"stream": False, "options": {"num_predict": 12, "seed": 3, "temperature": 1.5, **options}}
        return able.post("/api/chat", json=asked).json()["message"]["content"]

    asked = {"messages": CHAT["messages"], "max_tokens": 12, "seed": 3, "temperature": 1.5, **sampling}
    openai = able.post("/v1/chat/completions", json=asked).json()
    assert ask(**sampling) == openai["choices"][0]["message"]["content"] != ask()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mirostat": 2, "top_k": 40, "top_p": 0.9, "temperature": 0.8}, {"top_k", "top_p"}),
        ({"mirostat": 1, "mirostat_tau": 5.0, "top_k": 40, "temperature": 0}, {"mirostat", "mirostat_tau"}),
        ({"mirostat": 0, "mirostat_eta": 0.1, "top_k": 40}, {"mirostat_eta"}),
    ],
    ids=str,
)
def test_options_that_llamacpp_lets_count_for_nothing_beside_mirostat_are_named(able, options, named):
    answer = able.post("/api/chat", json={**CHAT, "options": {"num_predict": 2, **options}, "stream": False})
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-llmc-ignored"].split(", ")) == named


@pytest.mark.parametrize("raw", [True, False])
def test_prompts_are_answered_raw_or_through_the_template(able, raw):
    asked = {"model": "tiny:latest", "prompt": "import ", "raw": raw, "options": {"num_predict": 5, "temperature": 0}}
    pieces = lines(able.post("/api/generate", json=asked))
    whole = able.post("/api/generate", json=asked | {"stream": False}).json()
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert whole["eval_count"] == 5


def test_raw_prompts_take_the_values_that_mean_any_as_the_other_routes_do(able):
    options = {"num_predict": 3, "seed": -1, "top_k": -1, "top_p": 0}
    asked = {"model": "tiny", "prompt": "import ", "raw": True, "stream": False}
    assert able.post("/api/generate", json=asked | {"options": options}).json()["eval_count"] == 3
    refused = able.post("/api/generate", json=asked | {"options": {"num_predict": 0}})
    assert refused.status_code == 400 and "num_predict" in refused.json()["error"], refused.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_loads_the_model(able, path):
    assert able.post(path, json={"model": "tiny"}).json()["done_reason"] == "load"


def test_what_cannot_change_the_answer_is_named(able):
    options = {"num_predict": 2, "num_ctx": 4096, "num_thread": 3}
    answer = able.post("/api/chat", json={**CHAT, "options": options, "keep_alive": "5m", "stream": False})
    assert answer.status_code == 200
    assert set(answer.headers["x-llmc-ignored"].split(", ")) == {"keep_alive", "num_ctx", "num_thread"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "other"}, 404, "other"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "sees images"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["%"]}]}, 400, "is no base64"),
        ({**CHAT, "options": {"temprature": 1}}, 400, "temprature"),
        ({**CHAT, "options": {"top_p": 7}}, 400, "top_p"),
        ({**CHAT, "options": {"mirostat": 3}}, 400, "mirostat is 3, expected an integer from 0 to 2"),
        ({**CHAT, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "repeat_last_n"),
        ({**CHAT, "options": {"presence_penalty": 0.5, "repeat_last_n": 64}}, 400, "repeat_last_n"),
    ],
)
def test_errors_have_ollamas_form(able, body, status, said):
    answer = able.post("/api/chat", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_clients_find_models_and_what_they_can_do(able):
    [found] = able.get("/api/tags").json()["models"]
    assert (found["name"], found["details"]["quantization_level"]) == ("tiny", "int8")
    assert "tools" in able.post("/api/show", json={"model": "tiny:latest"}).json()["capabilities"]
    assert [each["model"] for each in able.get("/api/ps").json()["models"]] == ["tiny"]
    assert able.get("/api/version").json()["version"]


def test_a_call_that_the_length_cut_off_is_left_out():
    calls = (ToolCall("a1", "add", '{"a": 1}'), ToolCall("a2", "add", '{"a": '))
    assert [call["function"]["arguments"] for call in calls_of(Message("", None, calls, "length"))] == [{"a": 1}]
