"""The official ollama client, unmodified."""

import pytest
from pydantic import BaseModel

ollama = pytest.importorskip("ollama", reason="pip install ollama")

ASK = [{"role": "user", "content": "def f("}]
FEW = {"num_predict": 6, "seed": 1}


class Sum(BaseModel):
    a: int


@pytest.fixture
def client(service_url: str):
    return ollama.Client(host=service_url)


def add(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1


def test_it_lists_chats_streams_and_completes(client):
    [model] = [each.model for each in client.list().models]
    whole = client.chat(model, ASK, options=FEW)
    pieces = list(client.chat(model, ASK, options=FEW, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert client.generate(model, "import ", raw=True, options=FEW).response
    assert client.show(model).capabilities


def test_its_own_objects_go_back_in_the_second_turn(client):
    [model] = [each.model for each in client.list().models]
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 1}))
    said = ollama.Message(role="assistant", content="", tool_calls=[call])
    turns = [*ASK, said, {"role": "tool", "content": "2", "tool_name": "add"}]
    first = client.chat(model, turns, tools=[add], options=FEW)
    assert client.chat(model, [*turns, first.message, *ASK], tools=[add], options=FEW).done


def test_it_gets_what_its_schema_asks_for(client):
    [model] = [each.model for each in client.list().models]
    answer = client.chat(model, ASK, format=Sum.model_json_schema(), options={"seed": 1, "num_predict": 60})
    Sum.model_validate_json(answer.message.content)


def test_errors_are_its_own(client):
    with pytest.raises(ollama.ResponseError, match="other"):
        client.chat("other", ASK)
