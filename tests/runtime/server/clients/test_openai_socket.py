"""OpenAI's client over a WebSocket: turns that go on without a store, tools, and what its async twin does."""

from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

# The package asks for an older websockets than the one here, which warns of its use.
pytestmark = pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
USER: Any = {"role": "user", "content": "Write a function."}
GREEDY: dict[str, Any] = {"model": "able", "temperature": 0, "max_output_tokens": 40, "store": False}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
}
ONCE: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def client(service_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0) as found:
        yield found


def end_of(connection: Any) -> Any:
    return next(event for event in connection if event.type in ENDS)


def test_a_turn_streams_what_http_streams(client):
    wanted = client.responses.create(input=[USER], stream=True, **GREEDY)
    with client.responses.connect() as connection:
        connection.response.create(input=[USER], **GREEDY)
        for sent, event in zip(wanted, connection, strict=False):
            assert (event.type, event.sequence_number) == (sent.type, sent.sequence_number)
            assert getattr(event, "delta", None) == getattr(sent, "delta", None)
            if event.type in ENDS:
                assert event.response.usage == sent.response.usage
                break


def test_turns_go_on_and_a_tools_result_is_answered_without_a_store(client):
    with client.responses.connect() as connection:
        connection.response.create(input=[USER], **{**GREEDY, "max_output_tokens": 100}, **ONCE)
        first = end_of(connection).response
        call = first.output[-1]
        assert (first.status, call.type, first.store) == ("completed", "function_call", False)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        connection.response.create(input=[result], tools=[TOOL], previous_response_id=first.id, **GREEDY)
        second = end_of(connection).response
        connection.response.create(input="Go on.", previous_response_id=second.id, **GREEDY)
        third = end_of(connection).response
        connection.response.create(input=[{"role": "user"}], previous_response_id=third.id, **GREEDY)
        refused = end_of(connection).error
        assert refused.param == "input[0].content" and refused.message.startswith("input[0].content is missing")
    items = [USER, *first.output, result]
    by_hand = client.responses.create(input=items, tools=[TOOL], **GREEDY)
    assert (second.output_text, second.usage.input_tokens) == (by_hand.output_text, by_hand.usage.input_tokens)
    items += [*second.output, {"role": "user", "content": "Go on."}]
    by_hand = client.responses.create(input=items, **GREEDY)
    assert (third.output_text, third.usage.input_tokens) == (by_hand.output_text, by_hand.usage.input_tokens)
    assert third.previous_response_id == second.id
    with client.responses.connect() as other, pytest.raises(openai.OpenAIError, match="previous_response_not_found"):
        other.response.create(input="Go on.", previous_response_id=second.id, **GREEDY)
        other.dispatch_events()


def test_a_turn_goes_on_from_what_http_stored(client):
    stored = client.responses.create(input=[USER], **{**GREEDY, "store": True})
    with client.responses.connect() as connection:
        connection.response.create(input="Go on.", previous_response_id=stored.id, **{**GREEDY, "store": True})
        second = end_of(connection).response
    assert client.responses.retrieve(second.id).output == second.output
    assert [item.role for item in client.responses.input_items.list(second.id)] == ["user", "assistant", "user"]


def test_a_prompt_is_prepared_with_its_tools(client):
    with client.responses.connect() as connection:
        connection.response.create(input=[USER], generate=False, **GREEDY, **ONCE)
        ready = end_of(connection).response
        assert (ready.status, ready.output, ready.usage.output_tokens) == ("completed", [], 0)
        connection.response.create(input=[], previous_response_id=ready.id, **GREEDY, **ONCE)
        said = end_of(connection).response
    assert said.usage.input_tokens == ready.usage.input_tokens and said.output


def test_a_refusal_names_its_parameter_and_the_next_turn_is_answered(client):
    with client.responses.connect() as connection:
        for body in ({"top_p": 2}, {"background": True}, {"nonsense": 1}, {"model": "none"}):
            connection.send({"type": "response.create", "input": "Hi", **GREEDY, **body})
            refused = end_of(connection)
            assert refused.type == "error" and refused.error.param == next(iter(body))
        connection.response.create(input="Hi", **GREEDY)
        assert end_of(connection).type == "response.incomplete"


def test_what_is_ignored_is_named(client):
    with client.responses.connect() as connection:
        connection.response.create(input="Hi", service_tier="flex", **GREEDY)
        created = next(iter(connection))
    assert created.type == "response.created" and created.headers["x-llmc-ignored"] == "service_tier"


async def test_an_async_client_has_conversations_at_once(service_url):
    async with openai.AsyncOpenAI(base_url=f"{service_url}/v1", api_key="none") as client:
        async with client.responses.connect() as connection:
            for name in ("a", "b"):
                await connection.response.create(input=[USER], stream_id=name, **GREEDY)
            ended: dict[str, Any] = {}
            async for event in connection:
                if event.type in ENDS:
                    ended[event.stream_id] = event.response
                if len(ended) == 2:
                    break
            await connection.response.create(input="Go on.", previous_response_id=ended["a"].id, **GREEDY)
            last = await anext(event async for event in connection if event.type in ENDS)
    assert ended["a"].output_text == ended["b"].output_text
    assert last.response.usage.input_tokens > ended["a"].usage.input_tokens
