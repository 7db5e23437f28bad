"""langchain's model of OpenAI's chats."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
pytestmark = pytest.mark.filterwarnings("ignore")


class Add(BaseModel):
    """Add."""

    model_config = ConfigDict(extra="forbid")  # or else these weights invent members without end
    word: Literal["one", "two"]


@pytest.fixture
def chat(service_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model="able", base_url=f"{service_url}/v1", api_key="none", max_retries=0, max_tokens=128, stream_usage=True
    )


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_answered(chat: Any, streams: bool):
    asked = [messages.HumanMessage("Sum.", name="ann")]
    forced = chat.bind_tools([Add], tool_choice="required", parallel_tool_calls=False)
    said: Any = None
    if streams:
        for chunk in forced.stream(asked):
            said = chunk if said is None else said + chunk
    else:
        said = forced.invoke(asked)
    assert said.tool_calls[0]["args"]["word"] in ("one", "two")
    result = messages.ToolMessage("3", tool_call_id=said.tool_calls[0]["id"])
    assert chat.bind_tools([Add]).invoke([*asked, said, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_a_form(chat: Any, method: str):
    assert chat.with_structured_output(Add, method=method).invoke("Sum.").word in ("one", "two")


def test_a_stream_has_text_and_usage(chat: Any):
    chunks = list(chat.stream("Sum.", max_tokens=4))
    assert "".join(chunk.content for chunk in chunks) and any(chunk.usage_metadata for chunk in chunks)
