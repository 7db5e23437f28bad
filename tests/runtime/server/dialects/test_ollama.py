"""Ollama's dialect over plain HTTP: what its clients send, and what they need back."""

import json
from dataclasses import fields

import httpx2 as httpx
import pytest
from doubles.serving import retold, serving

from llmc.runtime import SamplingParams
from llmc.runtime.api.chat import Message, ToolCall
from llmc.runtime.server.config import ServerConfig
from llmc.runtime.server.dialects.ollama import Options, calls_of
from llmc.runtime.server.http.bodies import SPOKEN
from llmc.runtime.server.http.guarded import Guarded

ANN, ROOT = "sk-ann-0123456789", "sk-root-0123456789"

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def f("}], "options": {"num_predict": 6, "seed": 1}}


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def able(tiny_bundle, tmp_path_factory):
    """A client of a service whose model calls tools, thinks and fills gaps."""
    bundle = retold(tiny_bundle, tmp_path_factory.mktemp("ollama") / "bundle", marks=FIM)
    with serving(ServerConfig(models={"tiny": bundle}, threads=1), Guarded) as url:
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
    [{"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.9}, {"mirostat": 1}, {"typical_p": 0.2}],
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
    for raw in (True, False):
        refused = able.post("/api/generate", json=asked | {"options": {"num_predict": 0}, "raw": raw})
        assert refused.status_code == 400 and "options.num_predict" in refused.json()["error"], refused.text


def test_raw_prompts_spell_the_marks_that_suffix_writes(able, http):
    options = {"num_predict": 6, "temperature": 0}
    spelt = {"prompt": "<|fim_prefix|>" + BEFORE + "<|fim_suffix|>" + AFTER + "<|fim_middle|>", "raw": True}
    wanted = able.post("/v1/completions", json={"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0})
    for given in (spelt, {"prompt": BEFORE, "suffix": AFTER}, {"prompt": BEFORE, "suffix": AFTER, "raw": True}):
        pieces = lines(able.post("/api/generate", json={"model": "tiny", "options": options, **given}))
        assert "".join(piece["response"] for piece in pieces) == wanted.json()["choices"][0]["text"]
        assert pieces[-1]["prompt_eval_count"] == wanted.json()["usage"]["prompt_tokens"]
    asked = {"model": "tiny", "prompt": BEFORE, "suffix": AFTER}
    refused = http.post("/api/generate", json=asked)
    assert refused.status_code == 400 and refused.json()["error"].startswith("suffix is given, but")
    refused = able.post("/api/generate", json={**asked, "system": "Be brief."})
    assert refused.status_code == 400 and "system is given beside suffix" in refused.json()["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_a_prompt_loads_the_model(able, path):
    assert able.post(path, json={"model": "tiny"}).json()["done_reason"] == "load"


def test_what_is_not_known_is_ignored_and_named(able):
    options = {"num_predict": 2.0, "num_ctx": 4096, "low_vram": True, "temprature": 1, "repeat_last_n": 64}
    body = {**CHAT, "options": {**options, "repeat_penalty": 1.1}, "keep_alive": "5m", "max_output_tokens": 3}
    for stream in (True, False):
        answer = able.post("/api/chat", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        named = set(answer.headers["x-llmc-ignored"].split(", "))
        assert named == {*options.keys() - {"num_predict"}, "keep_alive", "max_output_tokens"}
    raw = able.post("/api/generate", json={"model": "tiny", "prompt": "a", "raw": True, "options": body["options"]})
    assert {"num_ctx", "repeat_last_n"} <= set(raw.headers["x-llmc-ignored"].split(", "))


def test_penalties_of_no_tokens_are_none():
    options = Options(repeat_last_n=0, repeat_penalty=1.3, presence_penalty=0.5).plain()
    assert options == {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def test_every_sampling_parameter_is_an_option(able):
    names = {field.name for field in fields(SamplingParams)} - SPOKEN
    assert names <= Options.model_fields.keys()
    chosen = {"min_p": 0.1, "choice": ["one", "two"], "seed": -1}
    answer = able.post("/api/chat", json={**CHAT, "stream": False, "options": chosen})
    assert answer.json()["message"]["content"] in ("one", "two") and "x-llmc-ignored" not in answer.headers


@pytest.mark.parametrize("think", [True, "high", False])
def test_a_wish_for_thoughts_is_named_where_the_model_has_none(http, think):
    answer = http.post("/api/chat", json={**CHAT, "stream": False, "think": think})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-llmc-ignored") == ("think" if think else None)


KINDS = ["application/octet-stream", "application/x-www-form-urlencoded", "text/plain", ""]


@pytest.mark.threat("foreign-pages")
@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_json_whatever_its_type_says_unless_a_browser_sent_it(able, kind):
    content, headers = json.dumps(CHAT).encode(), {"content-type": kind} if kind else {}
    assert able.post("/api/chat", content=content, headers=headers).status_code == 200
    own = f"{able.base_url.scheme}://{able.base_url.host}:{able.base_url.port}"
    for browser in ({"origin": own}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "none"}):
        assert able.post("/api/chat", content=content, headers={**headers, **browser}).status_code == 400
    sent = {"origin": own, "content-type": "application/json"}
    assert able.post("/api/chat", content=content, headers=sent).status_code == 200
    assert able.post("/v1/chat/completions", content=content, headers=headers).status_code == 400


@pytest.mark.parametrize("zero", [0, 0.0, "0", "0s", "0m0s"])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_no_time_to_stay_and_no_prompt_unload_the_model_and_never_load_it(able, path, zero):
    def loaded():
        return [each["model"] for each in able.get("/api/ps").json()["models"]]

    assert able.post(path, json={"model": "tiny"}).json()["done_reason"] == "load" and loaded() == ["tiny"]
    for _ in range(2):
        answer = able.post(path, json={"model": "tiny:latest", "keep_alive": zero}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "unload") and loaded() == []
    assert able.post(path, json={"model": "other", "keep_alive": zero}).status_code == 404
    assert able.post(path, json={"model": "tiny", "keep_alive": -1}).json()["done_reason"] == "load"


@pytest.mark.threat("admin")
def test_with_keys_an_admin_alone_unloads(tiny_bundle, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[ann]\nkey = "{ANN}"\n[root]\nkey = "{ROOT}"\nadmin = true\n')
    keys.chmod(0o600)
    config = ServerConfig(models={"tiny": tiny_bundle}, threads=1, keys_file=keys)
    with serving(config, Guarded) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = {"model": "tiny", "keep_alive": 0}
        asked = {key: client.post("/api/chat", json=body, headers={"x-api-key": key}) for key in (ANN, ROOT)}
    assert asked[ANN].status_code == 403 and "no admin's" in asked[ANN].json()["error"]
    assert asked[ROOT].json()["done_reason"] == "unload"


@pytest.mark.parametrize("given", ["a text", ["a text", "another"]])
def test_texts_are_embedded(able_http, given):
    answer = able_http.post("/api/embed", json={"model": "embed:latest", "input": given, "options": {"num_ctx": 8}})
    vectors = answer.json()
    wanted = able_http.post("/v1/embeddings", json={"model": "embed", "input": given}).json()
    assert vectors["embeddings"] == [each["embedding"] for each in wanted["data"]]
    assert vectors["prompt_eval_count"] == wanted["usage"]["prompt_tokens"] and vectors["total_duration"] > 0
    older = able_http.post("/api/embeddings", json={"model": "embed", "prompt": "a text"}).json()
    assert older["embedding"] == vectors["embeddings"][0]


def test_texts_that_are_too_long_are_cut_unless_that_is_unwanted(able_http):
    body = {"model": "embed", "input": "a " * 5000, "dimensions": 8}
    assert len(able_http.post("/api/embed", json=body).json()["embeddings"][0]) == 8
    refused = able_http.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400 and "at most 128" in refused.json()["error"], refused.text


def test_no_text_has_no_vectors_and_other_models_none_at_all(able_http):
    assert able_http.post("/api/embed", json={"model": "embed", "input": []}).json()["embeddings"] == []
    assert able_http.post("/api/embeddings", json={"model": "embed", "prompt": ""}).json() == {"embedding": []}
    for path, text in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        answer = able_http.post(path, json={"model": "able", text: "a"})
        assert answer.status_code == 400 and "generates text" in answer.json()["error"]


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy", "delete"])
def test_changes_of_the_models_say_how_models_get_here(able, name):
    answer = able.request("DELETE" if name == "delete" else "POST", f"/api/{name}", json={"model": "other"})
    assert answer.status_code == 400 and "llmc build" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "other"}, 404, "other"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "messages holds"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["%"]}]}, 400, "is no base64"),
        ({**CHAT, "options": {"top_p": 7}}, 400, "top_p"),
        ({**CHAT, "options": {"num_predict": 0}}, 400, "options.num_predict is 0"),
        ({**CHAT, "options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty is -1"),
        ({**CHAT, "options": {"mirostat": 3}}, 400, "mirostat is 3, expected an integer from 0 to 2"),
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
