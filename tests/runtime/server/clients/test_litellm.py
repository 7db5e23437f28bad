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
def test_a_tool_is_called_and_answered(service_url: str, streams: bool):
    given = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": streams}
    answer = ask(service_url, ASK, **given)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASK)
    said = answer.choices[0].message
    assert said.tool_calls[0].function.name == "add"
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "name": "add", "content": "3"}
    for message in (said, said.model_dump()):
        assert ask(service_url, [*ASK, message, result], tools=[TOOL], max_tokens=4).choices[0].message.content


def test_forms_streams_and_completions(service_url: str):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ARGUMENTS["properties"]["word"]}}
    assert ask(service_url, ASK, response_format=form).choices[0].message.content in ('"one"', '"two"')
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(service_url, ASK, stream=True, max_tokens=4))
    given = {"model": "text-completion-openai/able", "api_base": f"{service_url}/v1", "api_key": "none"}
    assert litellm.text_completion(prompt="a", max_tokens=4, **given).choices[0].text
