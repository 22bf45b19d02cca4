"""Anthropic's Messages with Anthropic's own client, over HTTP, down to the calls that are stored."""

from contextlib import asynccontextmanager

import anthropic
import pytest
from anthropic import AsyncAnthropic
from chat_models import QWEN
from gateway_site import site, until

from agentjet.errors import EngineError
from agentjet.schemas.call import ForkCause

ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Talk:
    """A client of one key."""

    def __init__(self, here, key, client):
        self.swarm, self.gateway, self.key, self.client = here.swarm, here.gateway, key, client

    async def ask(self, content="q", **fields):
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return await self.client.messages.create(**{"model": "m", "max_tokens": 200, "messages": messages} | fields)

    async def events(self, content="q", **fields):
        return [event async for event in await self.ask(content, stream=True, **fields)]


@asynccontextmanager
async def talk(bus, reply="hi", *, url="{}", **options):
    async with site(bus, reply, template=QWEN, **options) as here:
        key = await here.swarm.claim()
        async with AsyncAnthropic(base_url=url.format(here.url), api_key=key, max_retries=0) as client:
            yield Talk(here, key, client)


def script(*replies):
    remaining = iter(replies)
    return lambda prompt: next(remaining)


async def test_a_text_whole(memory_bus):
    async with talk(memory_bus, "low 12") as here:
        answer = await here.ask(system="be brief", metadata={"user_id": "u"})
        (call,) = await here.swarm.calls()
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "low 12", "citations": None}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == call.usage.prompt_tokens
    assert (answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (3, len(call.completion_ids))
    assert answer.id == f"msg_{call.call}"
    assert answer._request_id.startswith("req_")
    assert here.gateway.session(here.key).calls == {"m": [call.call]}


async def test_the_events_of_a_text_come_in_order_and_join(memory_bus):
    async with talk(memory_bus, "low é 12") as here:
        events = await here.events()
        (call,) = await here.swarm.calls()
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == "low é 12"
    assert len(deltas) > 3
    at_start, at_end = events[0].message.usage, events[-2].usage
    assert at_start.input_tokens == at_end.input_tokens == call.usage.prompt_tokens - 3
    assert (events[-2].delta.stop_reason, at_end.output_tokens) == ("end_turn", call.usage.completion_tokens)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a16_tool_turns_whole_or_streamed_are_one_branch(memory_bus, is_streamed):
    replies = script(f"see\n{CALL}\n{CALL}", CALL, "low")
    messages = [{"role": "user", "content": "q"}]
    async with talk(memory_bus, replies) as here:
        for _ in range(3):
            fields = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [ADD]}
            if is_streamed:
                async with here.client.messages.stream(**fields) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await here.client.messages.create(**fields)
            uses = [block for block in answer.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [{"a": 1}] * len(uses)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "2"} for use in uses]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
            assert answer.stop_reason == ("tool_use" if uses else "end_turn")
        calls = await here.swarm.calls()
    assert answer.content[0].text == "low"
    assert [call.parent for call in calls] == [None, calls[0].call, calls[1].call]
    assert [call.fork for call in calls] == [ForkCause.FIRST, ForkCause.NONE, ForkCause.NONE]
    assert [len(call.message.get("tool_calls", ())) for call in calls] == [2, 1, 0]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_sequence_is_named(memory_bus, is_streamed):
    async with talk(memory_bus, "low STOP 12") as here:
        fields = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "q"}]}
        if is_streamed:
            async with here.client.messages.stream(**fields, stop_sequences=["no", "STOP"]) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await here.ask(stop_sequences=["no", "STOP"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "low "


async def test_a_cut_reply_says_so(memory_bus):
    async with talk(memory_bus, "a long reply") as here:
        answer = await here.ask(max_tokens=2)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


async def test_a10_malformed_tool_json_reaches_the_agent_as_text(memory_bus):
    async with talk(memory_bus, '<tool_call>{"a": 1,') as here:
        answer = await here.ask(tools=[ADD])
        (call,) = await here.swarm.calls()
    assert [(block.type, block.text) for block in answer.content] == [("text", '<tool_call>{"a": 1,')]
    assert answer.stop_reason == "end_turn"
    assert call.completion_ids


async def test_a10_a_call_that_is_cut_is_an_object_and_no_edit_when_it_is_sent_back(memory_bus):
    async with talk(memory_bus, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b') as here:
        answer = await here.ask(tools=[ADD])
        back = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer.content}]
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "broken", "is_error": True}
        await here.ask(messages=[*back, {"role": "user", "content": [result]}], tools=[ADD])
        calls = await here.swarm.calls()
    assert answer.content[0].input == {"INVALID_JSON": '{"a": 1, "b'}
    assert calls[1].fork is ForkCause.TEMPLATE_REWROTE, "it writes broken arguments as a text"


@pytest.mark.parametrize("url", ["{}", "{}/", "{}/../"])
async def test_base_urls_with_and_without_the_version_work(memory_bus, url):
    async with site(memory_bus) as here:
        key = await here.swarm.claim()
        base_url = here.url.removesuffix("/v1") if ".." in url else url.format(here.url)
        async with AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0) as client:
            asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
            assert (await client.messages.create(**asked)).content[0].text == "hi"
            assert [model.id async for model in client.models.list()] == ["m"]


async def test_the_key_may_be_a_bearer_token(memory_bus):
    async with site(memory_bus) as here:
        key = await here.swarm.claim()
        async with AsyncAnthropic(base_url=here.url, auth_token=key) as client:
            asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
            assert (await client.messages.create(**asked)).content[0].text == "hi"


async def test_the_count_is_that_of_the_call_that_follows_and_is_no_call(memory_bus):
    async with talk(memory_bus) as here:
        asked = {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": [ADD], "system": "s"}
        count = await here.client.messages.count_tokens(**asked)
        assert await here.swarm.calls() == []
        assert not here.gateway.session(here.key).calls
        await here.client.messages.create(**asked, max_tokens=9)
        (call,) = await here.swarm.calls()
    assert count.input_tokens == call.usage.prompt_tokens


async def test_betas_and_unknown_tools_are_told_apart(memory_bus):
    async with talk(memory_bus) as here:
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
        answer = await here.client.beta.messages.create(**asked, betas=["interleaved-thinking-2025-05-14"])
        assert answer.content[0].text == "hi"
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].*web_search"):
            await here.ask(tools=[{"type": "web_search_20250305", "name": "web_search"}])


def error_of(caught):
    body = caught.value.body
    assert body["type"] == "error"
    assert body["request_id"] == caught.value.request_id == caught.value.response.headers["request-id"]
    return body["error"]["type"]


async def test_l9_a_model_that_is_not_served_is_refused_with_the_names(memory_bus):
    async with talk(memory_bus) as here:
        with pytest.raises(anthropic.NotFoundError, match="ask for one of: m") as caught:
            await here.ask(model="claude-x")
    assert error_of(caught) == "not_found_error"


async def test_a16_a_private_field_is_refused_by_name(memory_bus):
    async with talk(memory_bus) as here:
        with pytest.raises(anthropic.BadRequestError, match="guided_json") as caught:
            await here.ask(extra_body={"guided_json": "{}"})
    assert error_of(caught) == "invalid_request_error"


async def test_an_input_that_is_nested_too_deeply_is_refused(memory_bus):
    deep = "low"
    for _ in range(300):
        deep = {"a": deep}
    turns = [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": deep}]}]
    async with talk(memory_bus) as here:
        with pytest.raises(anthropic.BadRequestError, match="nested too deeply"):
            await here.ask(messages=[*turns, {"role": "user", "content": "q"}])


async def test_a_bad_key_and_a_superseded_one_are_refused(memory_bus):
    async with talk(memory_bus) as here:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await here.client.with_options(api_key="none").messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "q"}]
            )
        assert error_of(caught) == "authentication_error"
        await here.swarm.claim()
        with pytest.raises(anthropic.ConflictError) as caught:
            await here.ask()
    assert error_of(caught) == "conflict_error"


async def test_n1_a_prompt_over_the_context_is_an_error_and_the_stop_reason(memory_bus):
    async with talk(memory_bus, context_length=30) as here:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
            await here.ask("a long question" * 5)
        assert error_of(caught) == "invalid_request_error"
        assert here.gateway.session(here.key).stop_reason == "context"


async def test_n1_max_tokens_are_clamped_to_the_context(memory_bus):
    async with talk(memory_bus, "a long reply " * 20, context_length=60) as here:
        answer = await here.ask(max_tokens=400)
        (call,) = await here.swarm.calls()
    assert answer.stop_reason == "max_tokens"
    assert call.usage.prompt_tokens + call.usage.completion_tokens == 60


async def test_an_engine_that_fails_is_an_overloaded_error_before_and_in_the_stream(memory_bus):
    async with talk(memory_bus) as here:

        def lost(_):
            raise EngineError("lost")

        here.swarm.engine.reply = lost
        with pytest.raises(anthropic.InternalServerError, match="lost") as caught:
            await here.ask()
        assert error_of(caught) == "overloaded_error"

        def lost_later(index):
            if index == 4:
                raise EngineError("lost")

        here.swarm.engine.reply, here.swarm.engine.on_draw = "low é 12 hi", lost_later
        with pytest.raises(anthropic.APIStatusError, match="lost") as caught:
            await here.events()
    assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_wishes_without_a_switch_are_reported_once(memory_bus):
    async with talk(memory_bus) as here:
        ask = here.client.messages.with_raw_response.create
        fields = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
        fields |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {"top_p": 0.5}}
        first, second = await ask(**fields), await ask(**fields)
    assert first.headers["x-agentjet-overridden"] == "thinking, top_p"
    assert "x-agentjet-overridden" not in second.headers


async def test_closing_a_stream_cancels_the_generation(memory_bus):
    async with talk(memory_bus, "low 12 hi") as here:
        here.swarm.engine.go.clear()
        stream = await here.ask(stream=True)
        assert (await anext(aiter(stream))).type == "message_start"
        await stream.close()
        await until(lambda: here.swarm.engine.num_closed == 1)


async def test_a_marked_retry_gets_the_same_call(memory_bus):
    async with talk(memory_bus) as here:
        header = {"idempotency-key": "x"}
        first, second = await here.ask(extra_headers=header), await here.ask(extra_headers=header)
        third = await here.ask()
    assert first.id == second.id != third.id
