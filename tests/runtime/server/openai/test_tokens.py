"""Models and tokens: what clients ask before they ask the model."""

from typing import Any

import httpx2 as httpx
import openai
import pytest

from llmc.runtime import Model
from llmc.runtime.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello <|im_end|>"}]


def test_the_models_are_listed(client: openai.OpenAI):
    assert [found.id for found in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "llmc"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_text_is_tokenized_and_back(http: httpx.Client, model: Model):
    found = http.post("/tokenize", json={"prompt": "def f(x):"}).json()
    assert found["tokens"] == model.tokenizer.encode("def f(x):") and found["count"] == len(found["tokens"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "def f(x):"}


def test_a_conversation_is_tokenized_as_the_chat_does(http: httpx.Client, model: Model):
    assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == model.chat_tokens(MESSAGES)


def test_a_template_is_applied(http: httpx.Client, model: Model):
    assert http.post("/apply-template", json={"messages": MESSAGES}).json() == {
        "prompt": model.chat_template.render(MESSAGES)
    }


def test_tokens_that_are_none_are_refused(http: httpx.Client):
    assert http.post("/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"
    assert http.post("/tokenize", json={}).status_code == 400


def test_variables_that_arguments_give_are_refused(http: httpx.Client):
    body = {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    answer = http.post("/apply-template", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


ASKED: list[tuple[str, dict[str, Any], int]] = [
    ("/tokenize", {"prompt": "def f(x):"}, 2),
    ("/tokenize", {"messages": MESSAGES}, 1),
    ("/detokenize", {"tokens": [5, 6, 7]}, 3),
    ("/apply-template", {"messages": MESSAGES}, 1),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, 1),
    ("/v1/responses/input_tokens", {"input": "a"}, 1),
]


@pytest.mark.parametrize(("path", "body", "least"), ASKED)
def test_tokens_are_charged_as_those_of_prompts(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], least: int
):
    spent: list[int] = []
    monkeypatch.setattr("llmc.runtime.server.models.service.spend", lambda tokens: spent.append(tokens))
    answer = http.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200 and len(spent) == 1 and spent[0] >= least


def test_texts_that_no_context_holds_are_not_tokenized(http: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    error = http.post("/tokenize", json={"prompt": "a " * 1_000_000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = http.post("/detokenize", json={"tokens": [5] * 100_000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "tokens")
