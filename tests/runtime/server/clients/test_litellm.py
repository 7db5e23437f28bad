"""litellm, which many gateways and agents speak through."""

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("ignore")

ASK: Any = [{"role": "user", "content": [{"type": "text", "text": "Sum.", "cache_control": {"type": "ephemeral"}}]}]
ARGUMENTS = {"type": "object", "properties": {"word": {"enum": ["one", "two"]}}, "required": ["word"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS | {"additionalProperties": False}}}


def ask(service_url: str, messages: Any, **given: Any) -> Any:
    return litellm.completion(
        model="openai/able", api_base=f"{service_url}/v1", api_key="none", messages=messages, num_retries=0, **given
    )


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_answered(service_url, streams):
    given = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": streams}
    answer = ask(service_url, ASK, **given)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASK)
    said = answer.choices[0].message
    assert said.tool_calls[0].function.name == "add"
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "name": "add", "content": "3"}
    for message in (said, said.model_dump()):
        assert ask(service_url, [*ASK, message, result], tools=[TOOL], max_tokens=4).choices[0].message.content


def test_forms_streams_and_completions(service_url):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS["properties"]["word"]}}
    assert ask(service_url, ASK, response_format=form).choices[0].message.content in ('"one"', '"two"')
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(service_url, ASK, stream=True, max_tokens=4))
    given = {"model": "text-completion-openai/able", "api_base": f"{service_url}/v1", "api_key": "none"}
    assert litellm.text_completion(prompt="a", max_tokens=4, **given).choices[0].text


@pytest.mark.parametrize("kind", ["ollama", "ollama_chat"])
def test_ollamas_dialect(service_url, kind):
    given: Any = {"model": f"{kind}/able", "api_base": service_url, "messages": [{"role": "user", "content": "a"}]}
    options = {"max_tokens": 4, "temperature": 0, "num_ctx": 4096, "repeat_last_n": 64, "mirostat": 0}
    whole = litellm.completion(**given, **options).choices[0].message.content
    pieces = litellm.completion(**given, **options, stream=True)
    assert whole and "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert litellm.text_completion(model=f"{kind}/able", prompt="a", api_base=service_url, max_tokens=4).choices[0].text


def test_ollamas_vectors(service_url):
    for given in ("a", ["a", "b"]):
        found = litellm.embedding(model="ollama/embed", api_base=service_url, input=given).data
        assert len(found) == (2 if isinstance(given, list) else 1)
