"""OpenAI's Responses with OpenAI's own client, over HTTP, down to the calls that are stored."""

import itertools
from contextlib import asynccontextmanager

import openai
import pytest
from chat_models import QWEN
from gateway_site import site, until

from agentjet.errors import EngineError
from agentjet.gateway.responses_request import parse_responses
from agentjet.gateway.responses_stream import EventWriter
from agentjet.schemas.call import ForkCause, InferDelta, InferReply, ToolCallDelta

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Talk:
    """A client of one key."""

    def __init__(self, here, key, client):
        self.swarm, self.gateway, self.key, self.client = here.swarm, here.gateway, key, client

    async def ask(self, value="q", **fields):
        return await self.client.responses.create(model="m", input=value, **fields)

    async def events(self, value="q", **fields):
        return [event async for event in await self.ask(value, stream=True, **fields)]


@asynccontextmanager
async def talk(bus, reply="hi"):
    async with site(bus, reply, template=QWEN) as here:
        key = await here.swarm.claim()
        async with here.client(key) as client:
            yield Talk(here, key, client)


def script(*replies):
    remaining = iter(replies)
    return lambda prompt: next(remaining)


async def test_a_text_whole(memory_bus):
    async with talk(memory_bus, "low 12") as here:
        answer = await here.ask(instructions="be brief", metadata={"a": "b"}, max_output_tokens=50)
        (call,) = await here.swarm.calls()
    assert answer.output_text == "low 12"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage.input_tokens == call.usage.prompt_tokens
    assert answer.usage.output_tokens == len(call.completion_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("be brief", {"a": "b"}, 50)
    assert answer.id == f"resp_{call.call}"
    assert here.gateway.session(here.key).calls == {"m": [call.call]}


async def test_a_cut_reply_is_incomplete_whole_and_streamed(memory_bus):
    async with talk(memory_bus, "a long reply") as here:
        whole = await here.ask(max_output_tokens=2)
        *_, last = await here.events(max_output_tokens=2)
    for answer in (whole, last.response):
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"
    assert last.type == "response.incomplete"


async def test_the_events_of_a_text_and_a_call_come_in_openai_s_order(memory_bus):
    async with talk(memory_bus, f"see\n{CALL}") as here:
        events = await here.events(tools=[ADD])
        (call,) = await here.swarm.calls()
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(events, lambda event: event.type)]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].response.output == done
    assert done[1].call_id == call.message["tool_calls"][0]["id"]
    assert events[-1].response.usage.output_tokens == len(call.completion_ids)


async def test_the_client_s_own_snapshot_is_the_reply(memory_bus):
    async with (
        talk(memory_bus, f"low é 12\n{CALL}") as here,
        here.client.responses.stream(model="m", input="q", tools=[ADD]) as stream,
    ):
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == snapshots[-1] == "low é 12"
    assert snapshots[0] == "low"
    assert final.output[1].arguments == '{"a": 1}'


async def test_an_empty_reply_is_an_empty_text(memory_bus):
    async with talk(memory_bus, "") as here:
        whole = await here.ask()
        streamed = (await here.events())[-1].response
        again = await here.ask([{"role": "user", "content": "q"}, *whole.output, {"role": "user", "content": "more"}])
        calls = await here.swarm.calls()
    assert [item.type for item in whole.output] == [item.type for item in streamed.output] == ["message"]
    assert whole.output_text == streamed.output_text == again.output_text == ""
    assert calls[2].parent in (calls[0].call, calls[1].call)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
async def test_a_tool_episode_is_one_branch(memory_bus, is_streamed, is_named):
    """Whether the output is sent back, or the earlier response is named."""
    replies = [f"see\n{CALL}\n{CALL}", f"a\n{CALL}\nb", "done"]
    async with talk(memory_bus, script(*replies)) as here:
        history, new, answer = [], [{"role": "user", "content": "q"}], None
        for _ in replies:
            history += new
            fields = {"tools": [ADD], "instructions": "act"}
            if is_named and answer:
                fields["previous_response_id"] = answer.id
            value = new if is_named else history
            if is_streamed:
                answer = (await here.events(value, **fields))[-1].response
            else:
                answer = await here.ask(value, **fields)
            history += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": item.call_id, "output": "2"} for item in calls]
        stored = await here.swarm.calls()
    assert answer.output_text == "done"
    assert [call.parent for call in stored] == [None, stored[0].call, stored[1].call]
    assert [call.fork for call in stored] == [ForkCause.FIRST, ForkCause.NONE, ForkCause.NONE]


async def test_an_unknown_previous_response_is_refused(memory_bus):
    async with talk(memory_bus) as here:
        first = await here.ask()
        await here.ask("more", previous_response_id=first.id)
        here.gateway.forget(here.key)
        with pytest.raises(openai.BadRequestError, match="send the items") as caught:
            await here.ask("more", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_what_has_no_effect_is_named_in_a_header(memory_bus):
    async with talk(memory_bus) as here:
        answer = await here.client.responses.with_raw_response.create(
            model="m", input="q", top_p=0.5, reasoning={"effort": "low"}
        )
    assert answer.headers["x-agentjet-overridden"] == "reasoning.effort, top_p"


async def test_l9_a_model_that_is_not_served_is_refused_with_those_that_are(memory_bus):
    async with talk(memory_bus) as here:
        with pytest.raises(openai.NotFoundError, match="ask for one of: m"):
            await here.client.responses.create(model="gpt-5", input="q")


def test_the_rest_of_a_call_comes_before_the_text_behind_it():
    writer = EventWriter(parse_responses({"model": "m", "input": "q"}), "C")
    call = ToolCallDelta(index=0, id="c", name="add", arguments='{"a"')
    list(writer.delta(0, InferDelta(call="C", generation="g", index=0, tool_calls=(call,))))
    rest = (ToolCallDelta(index=0, arguments=": 1}"), ToolCallDelta(index=1, id="d", name="add", arguments="{}"))
    list(writer.delta(0, InferDelta(call="C", generation="g", index=9, text="done", tool_calls=rest)))
    reply = InferReply(call="C", generation="g")
    *_, last = [*writer.end(0, reply), *writer.finish([reply])]
    output = last.data["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message", "function_call"]
    assert output[0]["arguments"] == '{"a": 1}'


async def test_an_engine_lost_in_a_stream_ends_it_as_failed_and_raises(memory_bus):
    async with talk(memory_bus, "low 12") as here:

        def fail(index):
            if index == 2:
                raise EngineError("out of memory")

        here.swarm.engine.on_draw = fail
        seen = []
        with pytest.raises(openai.APIError, match="out of memory"):
            async for event in await here.ask(stream=True):
                seen.append(event)
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.status == "failed"


async def test_a_client_that_leaves_a_stream_cancels_the_call(memory_bus):
    async with talk(memory_bus) as here:
        here.swarm.engine.go.clear()
        stream = await here.ask(stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: here.swarm.engine.num_closed)
        assert here.gateway.session(here.key).calls == {}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a2_an_idempotency_key_gives_the_same_response_again(memory_bus, is_streamed):
    async with talk(memory_bus) as here:
        headers = {"idempotency-key": "x"}
        if is_streamed:
            first, second = [(await here.events(extra_headers=headers))[-1].response for _ in range(2)]
        else:
            first, second = [await here.ask(extra_headers=headers) for _ in range(2)]
        assert len(await here.swarm.calls()) == 1
    assert (first.id, first.output) == (second.id, second.output)
