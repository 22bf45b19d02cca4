"""LangChain's agent loop plays an episode with tools, through both of OpenAI's APIs."""

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tool_episode import SYSTEM, TASK, tool_episode


@pytest.mark.parametrize("has_responses", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_agent_of_langchain_is_one_branch(nats_bus, has_responses, is_streamed):
    async with tool_episode(nats_bus) as episode:
        model = ChatOpenAI(
            model="m",
            base_url=episode.url,
            api_key=episode.key,
            use_responses_api=has_responses,
            streaming=is_streamed,
            max_retries=0,
        )
        agent = create_agent(model, [tool(episode.add)], system_prompt=SYSTEM)
        state = await agent.ainvoke({"messages": [("user", TASK)]})
        await episode.check(state["messages"][-1].text)
