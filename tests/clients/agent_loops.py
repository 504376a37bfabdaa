"""Loops of two public agent libraries: each calls the tool that the model asks for, and ends with its result.

BASE_URL, MODEL and API_KEY are in the environment; the model follows the script of scripted_serve.py.
"""

from __future__ import annotations

import asyncio
import os

import agents
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Rome?"
RESULT = "Rome, 2 days: 21.5 degrees, hail"
called: list[tuple[str, int]] = []


def get_weather(city: str, days: int) -> str:
    """The weather of a city."""  # noqa: D401 - clients send it as the tool's description
    called.append((city, days))
    return f"{city}, {days} days: 21.5 degrees, hail"


async def openai_agents(client: AsyncOpenAI, model: str) -> list[str]:
    """Return answers by chat completions and by responses, whole and as a stream."""
    found = []
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        agent = agents.Agent(
            name="weather", instructions="Answer with the help of your tools.",
            model=kind(model=model, openai_client=client), tools=[agents.function_tool(get_weather)],
        )  # fmt: skip
        found.append((await agents.Runner.run(agent, QUESTION)).final_output)
        stream = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in stream.stream_events():
            pass
        found.append(stream.final_output)
    return found


async def pydantic_ai(client: AsyncOpenAI, model: str) -> list[str]:
    """Return answers by chat completions and by responses, whole and as a stream."""
    found = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=OpenAIProvider(openai_client=client)), tools=[get_weather])
        found.append((await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as stream:
            found.append(await stream.get_output())
    return found


async def main() -> None:
    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"]) as client:
        for library in (openai_agents, pydantic_ai):
            called.clear()
            outputs = await library(client, os.environ["MODEL"])
            assert called == [("Rome", 2)] * len(outputs), (library.__name__, called)
            assert all(RESULT in output for output in outputs), (library.__name__, outputs)
    print("openai-agents and pydantic-ai: chat and responses, whole and streamed")


asyncio.run(main())
