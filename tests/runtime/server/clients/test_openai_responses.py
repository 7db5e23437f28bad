"""OpenAI's client and its responses: what it was given it gives back, as objects and as their dumps with every null."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

openai = pytest.importorskip("openai")

USER: Any = {"role": "user", "content": "Write a function."}
GREEDY: dict[str, Any] = {"model": "able", "temperature": 0, "max_output_tokens": 100}
SHORT: dict[str, Any] = {**GREEDY, "max_output_tokens": 12}


class Sum(BaseModel):
    """Numbers to add."""

    a: Annotated[int, Field(ge=0, le=9)]


TOOLS: Any = [openai.pydantic_function_tool(Sum, name="add")["function"] | {"type": "function"}]
ONCE: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def client(service_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0) as found:
        yield found


def result_of(call: Any) -> dict[str, Any]:
    assert call.type == "function_call" and Sum.model_validate_json(call.arguments)
    return {"type": "function_call_output", "call_id": call.call_id, "output": "3"}


def test_a_tool_is_called_and_its_result_answered(client):
    with client.responses.stream(input=[USER], **GREEDY, **ONCE) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and answer.status == "completed"
    result = result_of(answer.output[-1])
    output = [item.model_dump() for item in answer.output]
    later = client.responses.create(input=[USER, *output, result], tools=TOOLS, store=False, **SHORT)
    assert later.output_text and later.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.parametrize("kind", ["objects", "dumps"])
def test_thoughts_are_given_back_by_who_stores_nothing(client, kind):
    stateless: dict[str, Any] = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "minimal", "summary": "auto"},
        **GREEDY,
    }
    first = client.responses.create(input=[USER], **{**stateless, "max_output_tokens": 160})
    assert first.output[0].type == "reasoning"
    output = [item.model_dump() for item in first.output] if kind == "dumps" else first.output
    later = client.responses.create(input=[USER, *output, {"role": "user", "content": "Go on."}], **stateless)
    assert later.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens_details.reasoning_tokens


def test_an_answer_is_parsed_as_a_type(client):
    found = client.responses.parse(input=[USER], text_format=Sum, **GREEDY).output_parsed
    assert isinstance(found, Sum) and found.a in range(10)
