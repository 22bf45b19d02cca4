"""The package `openai-agents` plays an episode with tools through both of its models."""

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from tool_episode import SYSTEM, TASK, tool_episode

NO_TRACE = RunConfig(tracing_disabled=True)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_an_agent_of_openai_agents_is_one_branch(nats_bus, model, is_streamed):
    async with (
        tool_episode(nats_bus) as episode,
        AsyncOpenAI(base_url=episode.url, api_key=episode.key, max_retries=0) as client,
    ):
        agent = Agent(
            name="adder",
            instructions=SYSTEM,
            model=model("m", client),
            tools=[function_tool(episode.add)],
            model_settings=ModelSettings(),
        )
        if is_streamed:
            result = Runner.run_streamed(agent, TASK, run_config=NO_TRACE)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, TASK, run_config=NO_TRACE)
        await episode.check(result.final_output)
