"""Models and tokens: what clients ask before they ask the model."""

from typing import Any

import openai
import pytest

from llmc.runtime.server.http.call import Client
from llmc.runtime.text.tokenizer import Tokenizer

VERSION = {"anthropic-version": "2023-06-01"}


def test_the_models_are_listed(client):
    assert [found.id for found in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "llmc"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def asked(text: str) -> dict[str, dict[str, Any]]:
    """Requests for the number of tokens, by route."""
    return {
        "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": text}]},
        "/v1/responses/input_tokens": {"input": text},
    }


@pytest.mark.threat("tokenize-cost")
@pytest.mark.parametrize("path", asked(""))
def test_tokens_are_charged_as_those_of_prompts(http, monkeypatch, path):
    spent: list[int] = []
    monkeypatch.setattr(Client, "spend", lambda client, tokens: spent.append(tokens))
    answer = http.post(path, json=asked("a")[path], headers=VERSION)
    assert answer.status_code == 200 and spent == [answer.json()["input_tokens"]] and spent[0] > 0


@pytest.mark.threat("tokenize-cost")
@pytest.mark.parametrize("path", asked(""))
def test_texts_that_no_context_holds_are_not_tokenized(http, monkeypatch, path):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    error = http.post(path, json=asked("a " * 1_000_000)[path], headers=VERSION).json()["error"]
    assert "tokens" in error["message"] and "input" not in error
