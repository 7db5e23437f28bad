"""The official openai client, unmodified: loops over streams, objects handed back, forms of pydantic."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "Write a function."}]


class Add(BaseModel):
    """Add."""

    word: Literal["one", "two"]


@pytest.fixture
def client(service_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_message_goes_back_as_it_came(client, streams):
    tools = [openai.pydantic_function_tool(Add)]
    given: Any = {"model": "able", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    if streams:
        with client.chat.completions.stream(messages=ASK, **given) as stream:
            said = stream.get_final_completion().choices[0].message
    else:
        said = client.chat.completions.parse(messages=ASK, **given).choices[0].message
    assert said.tool_calls and said.tool_calls[0].function.parsed_arguments.word in ("one", "two")
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": json.dumps({"sum": 3})}
    for message in (said, said.model_dump()):
        messages: Any = [*ASK, message, result]
        answer = client.chat.completions.create(model="able", messages=messages, tools=tools, max_tokens=4)
        assert answer.choices[0].message.content


def test_an_answer_is_parsed(client):
    answer = client.chat.completions.parse(model="able", messages=ASK, response_format=Add)
    assert answer.choices[0].message.parsed and answer.choices[0].message.parsed.word in ("one", "two")


def test_a_model_that_hears_nothing_says_so(client):
    with pytest.raises(openai.BadRequestError, match="the model 'able' hears no audio"):
        client.audio.transcriptions.create(model="able", file=("a.wav", b""))
