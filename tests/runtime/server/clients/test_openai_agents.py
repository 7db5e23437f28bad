"""OpenAI's agents: a tool is called and its result answered, over responses, their WebSocket, and chats."""

import asyncio
from typing import Any, Literal

import openai
import pytest

agents = pytest.importorskip("agents")

ONCE = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
# An answer that a limit cut off is a failure to the agent, and these weights come to no end by themselves.
STOPS = {"stop": ["(", "ing"]}


async def run(service_url: str, kind: str, streams: bool) -> tuple[Any, list[str]]:
    called: list[str] = []

    @agents.function_tool
    def add(word: Literal["one", "two"]) -> str:
        """Add."""
        called.append(word)
        return "3"

    async with openai.AsyncOpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0) as client:
        model = getattr(agents, kind)(model="able", openai_client=client)
        agent = agents.Agent(
            name="Adder",
            instructions="Be brief.",
            model=model,
            tools=[add],
            model_settings=agents.ModelSettings(extra_body=STOPS, **ONCE),
        )
        settings = agents.RunConfig(tracing_disabled=True)
        # After its first call the agent takes tool_choice back, and what this model says then is no call.
        if streams:
            result = agents.Runner.run_streamed(agent, "Write a function.", run_config=settings)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Write a function.", run_config=settings)
        await model.close()
    return result, called


@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIResponsesWSModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_run_calls_the_tool_and_ends_with_an_answer(service_url: str, kind: str, streams: bool):
    result, called = asyncio.run(run(service_url, kind, streams))
    assert called in (["one"], ["two"]) and result.final_output
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
