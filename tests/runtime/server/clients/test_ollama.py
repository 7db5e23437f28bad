"""The official ollama client, unmodified."""

import pytest

ollama = pytest.importorskip("ollama", reason="pip install ollama")

MODEL = "able"
ASK = [{"role": "user", "content": "def f("}]
FEW = {"num_predict": 6, "seed": 1}


@pytest.fixture
def client(service_url: str):
    found = ollama.Client(host=service_url)
    yield found
    found._client.close()


def add(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1


def test_it_lists_chats_streams_and_completes(client):
    assert MODEL in [each.model for each in client.list().models]
    whole = client.chat(MODEL, ASK, options=FEW)
    pieces = list(client.chat(MODEL, ASK, options=FEW, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert client.generate(MODEL, "import ", raw=True, options=FEW).response
    assert client.show(MODEL).capabilities


def test_its_own_objects_go_back_in_the_second_turn(client):
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 1}))
    said = ollama.Message(role="assistant", content="", tool_calls=[call])
    turns = [*ASK, said, {"role": "tool", "content": "2", "tool_name": "add"}]
    first = client.chat(MODEL, turns, tools=[add], options=FEW)
    assert client.chat(MODEL, [*turns, first.message, *ASK], tools=[add], options=FEW).done


def test_it_gets_what_its_schema_asks_for(client):
    answer = client.chat(MODEL, ASK, format={"enum": [1, 2]}, options={"seed": 1})
    assert answer.message.content in ("1", "2")


def test_errors_are_its_own(client):
    with pytest.raises(ollama.ResponseError, match="other"):
        client.chat("other", ASK)


def test_it_embeds_loads_and_unloads(client):
    several = client.embed("embed", ["a", "b"]).embeddings
    assert len(several) == 2 and client.embeddings("embed", "a").embedding == several[0]
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert MODEL not in [each.model for each in client.ps().models]
    assert client.generate(MODEL).done_reason == "load"


def test_it_is_told_how_models_get_here(client):
    for change in (
        lambda: client.pull("other"),
        lambda: list(client.pull("other", stream=True)),
        lambda: client.delete("a"),
    ):
        with pytest.raises(ollama.ResponseError, match="llmc build"):
            change()
