"""The gateway with OpenAI's own client, a real HTTP server, and the inference service behind a memory bus."""

import asyncio
import socket

import httpx
import openai
import pytest
from chat_models import QWEN, RUN, user
from gateway_site import site, until
from openai import AsyncOpenAI
from small_swarm import SECRET, SmallSwarm

from agentjet.accounting.key import Key, sign
from agentjet.config.settings import GatewaySettings
from agentjet.errors import BusTimeoutError, EngineError, UserError
from agentjet.gateway import ApiError, Gateway, access
from agentjet.gateway.endpoint import build_app
from agentjet.gateway.exchange import Exchange
from agentjet.gateway.limit import Limits
from agentjet.merging.timeline import merge_episode
from agentjet.schemas.call import FinishReason, ForkCause, InferDelta
from agentjet.schemas.claim import Authorization
from agentjet.schemas.codec import encode
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, infer, stream_name
from agentjet.schemas.task import EpisodeKind, Ticket

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def here(memory_bus):
    async with site(memory_bus) as here:
        yield here


async def test_a_chat_of_several_turns_continues_its_ids(here):
    key = await here.swarm.claim()
    messages = [user("a")]
    async with here.client(key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
            messages += [answer.choices[0].message, user("more")]
    calls = await here.swarm.calls()
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(calls[-1].completion_ids)
    assert answer.system_fingerprint == "0-0"
    assert [call.parent for call in calls] == [None, calls[0].call, calls[1].call]
    assert here.gateway.session(key).calls == {"m": [call.call for call in calls]}


async def test_a_stream_joins_to_the_content(here):
    here.swarm.engine.reply = "low é 12 hi"
    key = await here.swarm.claim()
    async with here.client(key) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m", messages=[user("q")], stream=True, stream_options={"include_usage": True}
            )
        ]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "low é 12 hi"
    assert len(texts) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 5
    assert len(here.gateway.session(key).calls["m"]) == 1


async def test_tool_calls_whole_and_streamed(memory_bus):
    async with site(memory_bus, f"see\n{CALL}", template=QWEN) as here:
        key = await here.swarm.claim()
        whole = (await here.say(key, tools=[ADD])).choices[0]
        async with here.client(key) as client:
            stream = await client.chat.completions.create(model="m", messages=[user("q")], tools=[ADD], stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert whole.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert whole.message.content == "".join(chunk.delta.content or "" for chunk in chunks) == "see"
    streamed = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert [(piece.index, piece.function.name) for piece in streamed[:2]] == [(0, "add"), (0, None)]
    assert "".join(piece.function.arguments for piece in streamed) == '{"a": 1}'


async def test_a10_malformed_tool_json_reaches_the_agent_as_text(memory_bus):
    async with site(memory_bus, '<tool_call>{"a": 1,', template=QWEN) as here:
        answer = await here.say(await here.swarm.claim(), tools=[ADD])
    assert answer.choices[0].message.content == '<tool_call>{"a": 1,'
    assert answer.choices[0].message.tool_calls is None


async def test_choices_and_log_probs(here):
    key = await here.swarm.claim()
    answer = await here.say(key, n=3, logprobs=True, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in content] == [("hi", -0.5), ("<|im_end|>", -0.5)]
    assert len(here.gateway.session(key).calls["m"]) == 3
    assert len({generation.sampling.seed for generation in here.swarm.engine.generations}) == 3


async def test_choices_of_an_evaluation_are_drawn_apart(here):
    key = await here.swarm.claim(kind=EpisodeKind.EVAL)
    await here.say(key, n=3)
    assert len({generation.sampling.seed for generation in here.swarm.engine.generations}) == 3


async def test_several_streamed_choices(here):
    async with here.client(await here.swarm.claim()) as client:
        stream = await client.chat.completions.create(model="m", messages=[user("q")], n=2, stream=True, logprobs=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    for index in (0, 1):
        assert "".join(c.delta.content or "" for c in chunks if c.index == index) == "hi"
    assert sum(bool(chunk.logprobs) for chunk in chunks) == 2


async def test_models_are_those_of_the_key(here):
    async with here.client(await here.swarm.claim()) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")


async def test_l9_a_model_that_is_not_served_is_refused_with_the_names(here):
    async with here.client(await here.swarm.claim()) as client:
        with pytest.raises(openai.NotFoundError, match="ask for one of: m") as caught:
            await client.chat.completions.create(model="gpt-4", messages=[user("q")])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "key", ["none", sign(b"x" * 32, Key(RUN, "g-0.0.0", 1, 2e9)), sign(SECRET, Key(RUN, "g-0.0.0", 1, 1.0))]
)
async def test_a_forged_or_expired_key_is_refused(here, key):
    with pytest.raises(openai.AuthenticationError) as caught:
        await here.say(key)
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("key", [Key("other", "g-0.0.0", 1, 2e9), Key(RUN, "g-0.0.0", 1, 2e9, role="curriculum")])
async def test_a_key_of_another_run_or_role_is_forbidden(here, key):
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await here.say(sign(SECRET, key))
    assert caught.value.code == "foreign_key"


async def test_an_older_attempts_key_is_superseded(here):
    old = await here.swarm.claim()
    await here.swarm.claim()
    with pytest.raises(openai.ConflictError):
        await here.say(old)


async def test_a1_every_third_failing_call_is_an_error_and_not_answered(here):
    calls = []

    def flaky(prompt):
        calls.append(prompt)
        if len(calls) % 3 == 0:
            raise EngineError("lost")
        return "hi"

    here.swarm.engine.reply = flaky
    key = await here.swarm.claim()
    failures = 0
    for index in range(6):
        try:
            await here.say(key, str(index))
        except openai.InternalServerError as error:
            failures += 1
            assert error.status_code == 503
            assert "lost" in str(error)
    session = here.gateway.session(key)
    assert (failures, len(session.calls["m"]), session.num_requests) == (2, 4, 6)
    assert [call.call for call in await here.swarm.calls()] == session.calls["m"]


async def test_n1_a_prompt_over_the_context_sets_the_stop_reason(memory_bus):
    async with site(memory_bus, context_length=30) as here:
        key = await here.swarm.claim()
        with pytest.raises(openai.BadRequestError) as caught:
            await here.say(key, "a long question" * 5)
        assert caught.value.code == "context_length_exceeded"
        assert here.gateway.session(key).stop_reason == "context"


async def test_a16_a_private_field_is_refused_by_name(here):
    with pytest.raises(openai.BadRequestError, match="guided_json") as caught:
        await here.say(await here.swarm.claim(), extra_body={"guided_json": "{}"})
    assert caught.value.param == "guided_json"


async def test_l3_overridden_fields_are_reported_once(here):
    key = await here.swarm.claim()
    async with here.client(key) as client:
        ask = client.chat.completions.with_raw_response.create
        fields = {"model": "m", "messages": [user("q")], "top_p": 0.5, "presence_penalty": 1.0}
        first, second = await ask(**fields), await ask(**fields)
    assert first.headers["x-agentjet-overridden"] == "presence_penalty, top_p"
    assert "x-agentjet-overridden" not in second.headers
    assert here.gateway.session(key).overridden == ["presence_penalty", "top_p"]
    assert here.swarm.engine.generations[0].sampling.top_p == 1.0


async def test_l3_a_streamed_response_names_what_was_overridden_in_its_own_head(here):
    async with here.client(await here.swarm.claim()) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=[user("q")], top_p=0.5, stream=True
        )
        assert raw.headers["x-agentjet-overridden"] == "top_p"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in raw.parse()]) == "hi"


async def test_the_agent_header_separates_histories(here):
    key = await here.swarm.claim()
    await here.say(key, extra_headers={"x-agentjet-agent": "scout"})
    assert (await here.swarm.calls())[0].agent == "scout"
    with pytest.raises(openai.BadRequestError, match="at most 200 characters"):
        await here.say(key, extra_headers={"x-agentjet-agent": "s" * 201})


async def test_t7_two_agents_under_one_key_are_two_branches(memory_bus):
    """By what they say alone: neither sends a header."""
    async with site(memory_bus, lambda prompt: "low " + prompt[-30:-12], context_length=2048) as here:
        key = await here.swarm.claim()
        parent, child = [user("plan the day")], [user("look the weather up")]
        async with here.client(key) as client:
            for _ in range(2):
                for messages in (parent, child):  # A1 B1 A2 B2
                    answer = await client.chat.completions.create(model="m", messages=messages)
                    messages += [answer.choices[0].message, user("and then?")]
        calls = await here.swarm.calls()
    assert [call.fork for call in calls] == [ForkCause.FIRST] * 2 + [ForkCause.NONE] * 2
    assert [call.parent for call in calls] == [None, None, calls[0].call, calls[1].call]
    assert here.gateway.session(key).calls["m"] == [call.call for call in calls]
    fields = {"group": "g-0", "member": 0, "group_size": 4, "seed": 7, "deadline_seconds": 600.0}
    claimed = Ticket(run=RUN, pool="g", models=("m",), ranks={"m": 0}, **fields)
    answered = {model: tuple(named) for model, named in here.gateway.session(key).calls.items()}
    outcome = {"outcome": Outcome.SCORED, "reward": 1.0, "attempt": calls[0].attempt}
    score = Score(run=RUN, ticket=claimed, calls=answered, **outcome)
    report = merge_episode(calls, ticket=claimed, model="m", score=score).report
    assert (report.num_branches, report.compression_ratio) == (2, 2.0)


async def test_closing_a_stream_cancels_the_generation(here):
    here.swarm.engine.go.clear()
    key = await here.swarm.claim()
    async with here.client(key) as client:
        stream = await client.chat.completions.create(model="m", messages=[user("q")], stream=True)
        await anext(aiter(stream))
        await stream.close()
    await until(lambda: here.swarm.engine.num_closed == 1)
    assert here.gateway.session(key).calls.get("m", []) == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_leaving_before_the_first_token_cancels_the_call(memory_bus, is_streamed):
    opened = asyncio.Event()
    swarm = SmallSwarm(memory_bus)
    swarm.service = swarm.new_service(admit=opened.wait)
    async with swarm.running():
        gateway = Gateway(memory_bus, RUN, GatewaySettings())
        url = await gateway.start()
        key = await swarm.claim()
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=0.2) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="m", messages=[user("q")], stream=is_streamed)
        await until(lambda: swarm.service.metrics()["num_waiting"] == 0)
        assert not swarm.engine.generations
        await gateway.close()


async def test_a_retry_after_a_lost_answer_returns_the_recorded_call(here):
    key, headers = await here.swarm.claim(), {"Idempotency-Key": "turn-1"}
    first = await here.say(key, extra_headers=headers)
    again = await here.say(key, extra_headers=headers)
    assert again.id == first.id
    assert len(await here.swarm.calls()) == 1
    assert len(here.gateway.session(key).calls["m"]) == 1


async def test_requests_with_one_idempotency_key_at_once_are_one_call(here):
    key, headers = await here.swarm.claim(), {"Idempotency-Key": "turn-1"}
    answers = await asyncio.gather(*(here.say(key, extra_headers=headers) for _ in range(5)))
    (call,) = await here.swarm.calls()
    assert {answer.id for answer in answers} == {f"chatcmpl-{call.call}"}
    assert here.gateway.session(key).calls == {"m": [call.call]}


async def test_an_idempotency_key_does_not_stand_for_another_request(here):
    key, headers = await here.swarm.claim(), {"Idempotency-Key": "turn-1"}
    first = await here.say(key, extra_headers=headers)
    for fields in ({"text": "p"}, {"n": 2}, {"extra_headers": headers | {"x-agentjet-agent": "scout"}}):
        with pytest.raises(openai.UnprocessableEntityError, match="a key of its own") as caught:
            await here.say(key, **{"extra_headers": headers} | fields)
        assert (caught.value.code, caught.value.param) == ("idempotency_key_reused", "Idempotency-Key")
    again = await here.say(key, extra_headers=headers)
    assert again.id == first.id
    assert len(here.swarm.engine.generations) == 1


async def test_two_equal_requests_are_two_samples(here):
    key = await here.swarm.claim()
    first, second = await here.say(key), await here.say(key)
    assert first.id != second.id
    assert len(here.gateway.session(key).calls["m"]) == 2


async def test_a_call_is_not_cancelled_while_its_retry_looks_for_it(here, monkeypatch):
    key, looking, go_on = await here.swarm.claim(), asyncio.Event(), asyncio.Event()
    stored = Exchange.stored

    async def slow(*args):
        looking.set()
        await go_on.wait()
        return await stored(*args)

    here.swarm.engine.go.clear()
    headers = {"idempotency-key": "x"}
    first = asyncio.create_task(here.say(key, extra_headers=headers))
    await until(lambda: here.swarm.engine.generations)
    monkeypatch.setattr(Exchange, "stored", slow)
    second = asyncio.create_task(here.say(key, extra_headers=headers))
    await looking.wait()
    first.cancel()
    await asyncio.sleep(0.2)  # the gateway has seen that the first one is gone
    go_on.set()
    here.swarm.engine.go.set()
    answer = await asyncio.wait_for(second, 5)
    assert answer.choices[0].message.content == "hi"
    assert len(here.swarm.engine.generations) == 1


async def test_a_retry_that_joins_a_running_stream_gets_all_of_it(memory_bus):
    async with site(memory_bus, "low low low") as here:
        here.swarm.engine.go.clear()
        async with here.client(await here.swarm.claim()) as client:

            async def chunks():
                stream = await client.chat.completions.create(
                    model="m", messages=[user("q")], stream=True, extra_headers={"idempotency-key": "x"}
                )
                async for chunk in stream:
                    yield chunk.choices[0].delta.content or ""

            first = chunks()
            head = await anext(first)
            second = asyncio.create_task(_joined(chunks()))
            await until(lambda: here.gateway._exchange._waiting and len(*here.gateway._exchange._waiting.values()) == 2)
            here.swarm.engine.go.set()
            assert (head + await _joined(first), await second) == ("low low low", "low low low")
            assert len(here.swarm.engine.generations) == 1


async def _joined(pieces):
    return "".join([piece async for piece in pieces])


async def test_a_marked_retry_after_a_disconnect_never_gets_a_cut_reply(here):
    here.swarm.engine.go.clear()
    key = await here.swarm.claim()
    async with here.client(key, timeout=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=[user("q")])
    await until(lambda: here.swarm.engine.num_closed == 1)
    here.swarm.engine.go.set()
    answer = await here.say(key, extra_headers={"x-stainless-retry-count": "1"})
    assert answer.choices[0].message.content == "hi"
    calls = await here.swarm.calls()
    assert [call.finish_reason for call in calls] == [FinishReason.CANCELLED, FinishReason.STOP]
    assert here.gateway.session(key).calls["m"] == [calls[1].call]


@pytest.mark.parametrize("header", [{"idempotency-key": "x"}, {"x-stainless-retry-count": "1"}])
async def test_a_retry_while_the_bus_is_away_is_told_to_come_again_and_then_gets_its_call(here, monkeypatch, header):
    async def nothing(*_):
        pass

    async def away(*_):
        raise BusTimeoutError("reading CALLS: no answer")

    monkeypatch.setattr(Exchange, "_cancel", nothing)  # the caller's leaving is not heard of in time
    here.swarm.engine.go.clear()
    key = await here.swarm.claim()
    with pytest.raises(openai.APITimeoutError):
        await here.say(key, timeout=0.2, extra_headers={name: header[name] for name in header if name[0] == "i"})
    here.swarm.engine.go.set()
    await until(lambda: here.swarm.service.metrics().get("num_calls"))
    last = here.swarm.bus.last
    monkeypatch.setattr(here.swarm.bus, "last", away)
    with pytest.raises(openai.InternalServerError, match="has finished can not be read now") as refused:
        await here.say(key, extra_headers=header)
    monkeypatch.setattr(here.swarm.bus, "last", last)
    again = await here.say(key, extra_headers=header)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "1"
    assert again.id == f"chatcmpl-{(await here.swarm.calls())[0].call}"
    assert len(here.swarm.engine.generations) == 1


async def test_a_call_without_http(here):
    key = await here.swarm.claim()
    answer = await here.gateway.complete(key, {"model": "m", "messages": [user("q")]}, agent="a")
    assert answer["choices"][0]["message"]["content"] == "hi"
    with pytest.raises(ApiError, match="stream"):
        await here.gateway.complete(key, {"model": "m", "messages": [user("q")], "stream": True})
    here.gateway.forget(key)
    assert here.gateway.session(key).num_requests == 0


async def test_a_reply_that_was_lost_is_found_in_calls(memory_bus):
    swarm = SmallSwarm(memory_bus)
    async with swarm.running():
        exchange = Exchange(memory_bus, RUN, look_seconds=0.05)
        await exchange.start()
        key = await swarm.claim()
        request = swarm.request(key, [user("q")])
        _, reply = await swarm.ask(request)
        swarm.service.cancel(request.call)  # from now on the service drops this question
        answers = [a async for a in exchange.ask(request, "g-0.0.0", 1)]
        assert answers == [reply]
        await exchange.close()


async def test_a_question_that_was_lost_is_asked_again(memory_bus):
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    exchange = Exchange(memory_bus, RUN, look_seconds=0.05)
    await exchange.start()
    request = swarm.request(await swarm.claim(), [user("q")])
    asked = asyncio.create_task(anext(exchange.ask(request, "g-0.0.0", 1)))
    stream = stream_name(RUN, Stream.INFER)
    await asyncio.sleep(0.02)
    await memory_bus.purge(stream, below_sequence=2)
    await asyncio.sleep(0.1)
    again = await memory_bus.last(stream, infer(RUN, "m"))
    assert again is not None
    assert again.sequence > 1
    await swarm.service.handle(again)
    assert (await asked).message["content"] == "hi"
    await exchange.close()


async def test_an_engine_that_never_answers_is_a_timeout(memory_bus):
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    settings = GatewaySettings(request_seconds=0.1)
    async with memory_bus.serve(f"aj.{RUN}.rpc.authorize", swarm.authorize, queue="q"):
        gateway = Gateway(memory_bus, RUN, settings)
        with pytest.raises(ApiError, match="is its engine up") as caught:
            await gateway.complete(await swarm.claim(), {"model": "m", "messages": [user("q")]})
        assert caught.value.status == 504
        await gateway.close()


async def test_without_a_curriculum_the_key_can_not_be_checked(memory_bus, monkeypatch):
    monkeypatch.setattr(access, "PATIENCE_SECONDS", 0.0)
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    gateway = Gateway(memory_bus, RUN, GatewaySettings())
    with pytest.raises(ApiError) as caught:
        await gateway.complete(await swarm.claim(), {"model": "m", "messages": [user("q")]})
    assert caught.value.status == 503
    await gateway.close()


async def test_a_curriculum_that_is_started_again_is_waited_for(memory_bus, monkeypatch):
    monkeypatch.setattr(access, "_AGAIN_SECONDS", 0.01)
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    gateway = Gateway(memory_bus, RUN, GatewaySettings())
    asked = asyncio.create_task(gateway.models(await swarm.claim()))
    await asyncio.sleep(0.05)
    assert not asked.done()
    async with memory_bus.serve(f"aj.{RUN}.rpc.authorize", busy_at_first(swarm), queue="q"):
        assert await asked == ("m",)
    await gateway.close()


def busy_at_first(swarm):
    answers = iter([Authorization(granted=False, reason="busy")])

    async def authorize(request):
        busy = next(answers, None)
        if busy is None:
            return await swarm.authorize(request)
        headers, body = encode(busy)
        return body, headers

    return authorize


async def test_while_the_curriculum_is_away_a_key_that_it_knew_still_counts(memory_bus, monkeypatch):
    monkeypatch.setattr(access, "CACHE_SECONDS", 0.0)
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    gateway = Gateway(memory_bus, RUN, GatewaySettings())
    key = await swarm.claim()
    async with memory_bus.serve(f"aj.{RUN}.rpc.authorize", swarm.authorize, queue="q"):
        await gateway.models(key)
    assert await gateway.models(key) == ("m",)
    await gateway.close()


async def test_a_second_generation_is_never_spliced_into_a_stream(here):
    here.swarm.engine.go.clear()
    here.swarm.engine.reply = "low low"
    key = await here.swarm.claim()
    async with here.client(key) as client:
        stream = aiter(await client.chat.completions.create(model="m", messages=[user("q")], stream=True))
        await anext(stream)
        call = next(iter(here.gateway._exchange._waiting))
        headers, body = encode(InferDelta(call=call, generation="other", index=1, text="x"))
        await here.swarm.bus.send(here.gateway._exchange._inbox, body, headers=headers)
        with pytest.raises(openai.APIError, match="engine was lost"):
            await anext(stream)


async def test_a_body_over_the_limit_is_refused(memory_bus):
    async with site(memory_bus, settings=GatewaySettings(max_body_bytes=500)) as here:
        with pytest.raises(openai.APIStatusError) as caught:
            await here.say(await here.swarm.claim(), "x" * 1000)
    assert caught.value.status_code == 413


async def test_a_caller_that_leaves_while_it_sends_is_no_crash(here):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    await build_app(here.gateway, Limits(GatewaySettings()))(scope, receive, send)
    assert sent[0]["status"] == 499


async def test_broken_json_and_unknown_paths_are_shaped_errors(here):
    key = await here.swarm.claim()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
        broken = await client.post(f"{here.url}/chat/completions", content=b"{")
        unknown = await client.get(f"{here.url}/embeddings")
        wrong = await client.get(f"{here.url}/chat/completions")
    assert [response.status_code for response in (broken, unknown, wrong)] == [400, 404, 405]
    assert all(set(response.json()["error"]) == {"message", "type", "param", "code"} for response in (broken, unknown))


async def test_a_port_in_use_is_one_sentence(memory_bus):
    swarm = SmallSwarm(memory_bus)
    await swarm.prepare()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(memory_bus, RUN, GatewaySettings(port=taken.getsockname()[1]))
        with pytest.raises(UserError, match="the port is in use"):
            await gateway.start()
        await gateway.close()
