"""An agent of AgentScope plays an episode with tools, through both of OpenAI's APIs."""

import pytest
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel, OpenAIResponseModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from tool_episode import SYSTEM, TASK, tool_episode

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponseModel])
async def test_an_agent_of_agentscope_is_one_branch(nats_bus, model, is_streamed):
    async with tool_episode(nats_bus) as episode:
        credential = OpenAICredential(api_key=episode.key, base_url=episode.url)
        agent = Agent(
            name="adder",
            system_prompt=SYSTEM,
            model=model(credential, "m", stream=is_streamed, max_retries=0),
            toolkit=Toolkit([FunctionTool(episode.add, permission=ALLOWED)]),
        )
        reply = await agent.reply(UserMsg("user", TASK))
        await episode.check(reply.get_text_content())
