"""Anthropic's own client plays an episode with tools."""

import pytest
from anthropic import AsyncAnthropic
from tool_episode import SYSTEM, TASK, tool_episode

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two numbers.", "input_schema": NUMBERS}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_episode_with_tools_over_messages_is_one_branch(nats_bus, is_streamed):
    messages = [{"role": "user", "content": TASK}]
    fields = {"model": "m", "max_tokens": 1000, "system": SYSTEM, "tools": [ADD]}
    async with (
        tool_episode(nats_bus) as episode,
        AsyncAnthropic(base_url=episode.url.removesuffix("/v1"), api_key=episode.key, max_retries=0) as client,
    ):
        results = [None]
        while results:
            if is_streamed:
                async with client.messages.stream(messages=messages, **fields) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **fields)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(episode.add(**block.input))}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        await episode.check(answer.content[0].text)
