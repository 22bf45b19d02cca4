"""Text completions with OpenAI's own client, over HTTP, down to the calls that are stored."""

import openai
import pytest
from chat_models import QWEN
from gateway_site import site
from hypothesis import given
from hypothesis import strategies as st

from agentjet.gateway.completions import parse_completions
from agentjet.gateway.fault import ApiError
from agentjet.schemas.call import ForkCause

BODY = {"model": "m", "prompt": "q"}


def refused(is_strict=False, **fields):
    with pytest.raises(ApiError) as caught:
        parse_completions(BODY | fields, is_strict=is_strict)
    assert caught.value.status == 400
    return caught.value


def test_fields_are_taken_and_the_default_limit_is_that_of_the_api():
    request = parse_completions(BODY | {"stop": "x", "seed": 3, "n": 2})
    assert (request.prompt, request.messages, request.num_choices) == ("q", (), 2)
    assert (request.sampling.max_tokens, request.sampling.stop, request.sampling.seed) == (16, ("x",), 3)
    assert "max_tokens" in request.given
    assert parse_completions(BODY | {"prompt": ["q"], "echo": False, "best_of": 1}) == parse_completions(BODY)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"prompt": ""},
        {"echo": True},
        {"suffix": "s"},
        {"best_of": 2},
        {"logprobs": 3},
        {"logprobs": True},
        {"n": 0},
        {"max_tokens": 0},
        {"stream_options": {"include_usage": True}},
        {"messages": []},
        {"private": 1},
    ],
)
def test_a16_what_is_not_supported_is_refused_by_name(fields):
    assert refused(**fields).param == next(iter(fields))


@pytest.mark.parametrize("fields", [{"presence_penalty": 1}, {"top_p": 0.5}, {"temperature": 0}])
def test_l3_what_breaks_the_ratio_is_refused_where_strict(fields):
    assert refused(is_strict=True, **fields).param == next(iter(fields))
    assert parse_completions(BODY | fields).lifted in ((), ("presence_penalty",))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["prompt", "stop", "n", "logprobs", "stream", "stream_options", "max_tokens", "best_of", "echo", "seed"]


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5))
def test_any_body_is_parsed_or_refused(fields):
    try:
        parse_completions(BODY | fields)
    except ApiError as error:
        assert error.status == 400


async def test_prompts_that_go_on_are_one_branch_also_after_a_restart(memory_bus):
    async with site(memory_bus, "low 12") as here, here.client(await here.swarm.claim()) as client:
        text = "q:"
        for turn in range(3):
            answer = await client.completions.create(model="m", prompt=text, max_tokens=3)
            text += answer.choices[0].text + "\nmore:"
            if turn == 1:
                here.swarm.service._histories = here.swarm.new_service()._histories
        calls = await here.swarm.calls()
        prompts = [here.swarm.engine.prompt_text(index) for index in range(3)]
    assert answer.choices[0].text == "low 12"
    assert (answer.choices[0].finish_reason, answer.object) == ("length", "text_completion")
    assert answer.usage.prompt_tokens == calls[-1].usage.prompt_tokens
    assert [call.parent for call in calls] == [None, calls[0].call, calls[1].call]
    assert [call.fork for call in calls] == [ForkCause.FIRST, ForkCause.NONE, ForkCause.NONE]
    assert [call.prompt for call in calls] == ["q:", "\nmore:", "\nmore:"]
    assert prompts[2] == text[: len(prompts[2])]


async def test_a_stream_joins_and_ends_with_the_counts(memory_bus):
    async with site(memory_bus, "low é 12") as here, here.client(await here.swarm.claim()) as client:
        stream = await client.completions.create(
            model="m", prompt="q", max_tokens=50, n=2, stream=True, stream_options={"include_usage": True}, logprobs=0
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    for index in (0, 1):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == "low é 12"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        assert len(mine[-1].logprobs.tokens) == len(mine[-1].logprobs.token_logprobs) > 3
    assert chunks[-1].usage.completion_tokens > 8


async def test_log_probs_stop_strings_and_marks_are_plain(memory_bus):
    said = '<think>a</think><tool_call>{"name": "a"}</tool_call> STOP'
    async with site(memory_bus, said, template=QWEN) as here, here.client(await here.swarm.claim()) as client:
        answer = await client.completions.create(model="m", prompt="q", max_tokens=99, stop="STOP", logprobs=0)
    (choice,) = answer.choices
    assert choice.text + "STOP" == said
    assert choice.finish_reason == "stop"
    assert "".join(choice.logprobs.tokens) == said
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]


async def test_n1_and_l9_errors_name_what_is_wrong(memory_bus):
    async with site(memory_bus, context_length=30) as here:
        key = await here.swarm.claim()
        async with here.client(key) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="m", prompt="long " * 20)
            assert caught.value.code == "context_length_exceeded"
            assert here.gateway.session(key).stop_reason == "context"
            with pytest.raises(openai.NotFoundError, match="ask for one of: m"):
                await client.completions.create(model="gpt", prompt="q")
