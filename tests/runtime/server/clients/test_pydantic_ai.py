"""pydantic-ai: an agent calls a tool and answers, in text and in a form, over chats."""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel

pydantic_ai = pytest.importorskip("pydantic_ai")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")
pytestmark = pytest.mark.filterwarnings("ignore")


class Sum(BaseModel):
    """A sum."""

    word: Literal["one", "two"]


def agent_of(service_url: str, kind: Any, **body: Any) -> tuple[Any, list[str]]:
    provider = providers.OpenAIProvider(base_url=f"{service_url}/v1", api_key="none")
    settings = {"parallel_tool_calls": False, "max_tokens": 128, "extra_body": body}
    agent = pydantic_ai.Agent(
        models.OpenAIChatModel("able", provider=provider), output_type=kind, model_settings=settings, retries=0
    )
    called: list[str] = []

    @agent.tool_plain
    def add(word: Literal["one", "two"]) -> str:
        """Add."""
        called.append(word)
        return "3"

    return agent, called


async def run(agent: Any, streams: bool, **given: Any) -> Any:
    if not streams:
        return await agent.run("Sum.", **given)
    async with agent.run_stream("Sum.", **given) as stream:
        await stream.get_output()
        return stream


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_conversation_goes_on_after_a_call(service_url: str, streams: bool):
    """The history is another agent's, of the same client, for this model does not choose to call."""
    tool = {"type": "function", "function": {"name": "final_result"}}
    asked, _ = agent_of(service_url, Sum, tool_choice=tool)
    first = asyncio.run(run(asked, streams))
    agent, _ = agent_of(service_url, str, stop=["("])
    second = asyncio.run(run(agent, streams, message_history=first.all_messages()))
    assert len(second.all_messages()) > len(first.all_messages())
