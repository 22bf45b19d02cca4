"""OpenAI's own client plays an episode with tools, in both of its APIs."""

import json

import pytest
from openai import AsyncOpenAI
from tool_episode import SYSTEM, TASK, tool_episode

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": NUMBERS, "strict": True}


async def chat(client, episode, is_streamed):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    fields = {"model": "m", "tools": [{"type": "function", "function": ADD}]}
    while True:
        if is_streamed:
            async with client.chat.completions.stream(messages=messages, **fields) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(messages=messages, **fields)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = str(episode.add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return message.content


async def responses(client, episode, is_streamed):
    items = [{"role": "user", "content": TASK}]
    fields = {"model": "m", "instructions": SYSTEM, "tools": [{"type": "function", **ADD}]}
    while True:
        if is_streamed:
            async with client.responses.stream(input=items, **fields) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(input=items, **fields)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        for call in calls:
            result = str(episode.add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            return answer.output_text


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("play", [chat, responses])
async def test_an_episode_with_tools_is_one_branch(nats_bus, play, is_streamed):
    async with (
        tool_episode(nats_bus) as episode,
        AsyncOpenAI(base_url=episode.url, api_key=episode.key, max_retries=0) as client,
    ):
        await episode.check(await play(client, episode, is_streamed))
