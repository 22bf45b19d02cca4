"""Every field of a body is honoured, harmless, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.gateway.chat_request import parse_chat
from agentjet.gateway.fault import ApiError
from agentjet.schemas.call import ToolChoice
from agentjet.schemas.sampling import Sampling

BODY = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
TOOL = {"type": "function", "function": {"name": "add"}}


def parse(**fields):
    return parse_chat(BODY | fields)


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_sampling_fields_are_taken_and_named():
    request = parse(temperature=1, top_p=0.9, max_tokens=8, stop="x", seed=3)
    assert request.sampling == Sampling(temperature=1.0, top_p=0.9, max_tokens=8, stop=("x",), seed=3)
    assert set(request.given) == {"temperature", "top_p", "max_tokens", "stop", "seed"}
    assert parse().given == ()


def test_the_newer_name_of_max_tokens_wins():
    assert parse(max_tokens=8, max_completion_tokens=4).sampling.max_tokens == 4


def test_null_is_absent():
    assert parse(temperature=None, tools=None, private=None) == parse()


@pytest.mark.parametrize("name", ["private", "guided_json", "reasoning", "temprature"])
def test_a16_an_unknown_field_is_refused_by_name(name):
    error = refused(**{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")
    assert name in str(error)


@pytest.mark.parametrize(
    "fields",
    [{"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"parallel_tool_calls": True}, {"logit_bias": {}}],
)
def test_fields_that_change_no_token_are_accepted(fields):
    assert parse(**fields) == parse()


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": []},
        {"tool_choice": {"type": "function"}, "tools": [TOOL]},
        {"tool_choice": "maybe", "tools": [TOOL]},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"top_logprobs": 5},
        {"functions": []},
        {"parallel_tool_calls": False},
        {"n": 0},
        {"n": True},
        {"stop": [""]},
        {"stop": ["x"] * 65},
        {"stop": "x" * 257},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"max_completion_tokens": -1},
        {"seed": 2**63},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"tools": [{"type": "web_search"}]},
        {"messages": []},
        {"messages": ["q"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"model": 3},
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields):
    assert refused(**fields).param == next(iter(fields))


def test_a_missing_field_is_named():
    with pytest.raises(ApiError, match="messages: is missing"):
        parse_chat({"model": "m"})
    with pytest.raises(ApiError, match="JSON object"):
        parse_chat([])


@pytest.mark.parametrize(
    ("asked", "choice", "name"),
    [
        ({}, ToolChoice.AUTO, ""),
        ({"tool_choice": "none"}, ToolChoice.NONE, ""),
        ({"tool_choice": "required"}, ToolChoice.REQUIRED, ""),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ToolChoice.REQUIRED, "add"),
    ],
)
def test_tools_stay_in_the_prompt_whatever_the_choice(asked, choice, name):
    request = parse(tools=[TOOL], **asked)
    assert (request.tools, request.tool_choice, request.tool_name) == ((TOOL,), choice, name)


def test_l3_fields_that_bend_the_distribution_are_lifted_and_listed():
    assert parse(presence_penalty=0.5, frequency_penalty=0, logit_bias={"1": 5}).lifted == (
        "presence_penalty",
        "logit_bias",
    )


def test_wishes_without_a_switch_are_listed():
    assert parse(reasoning_effort="low", verbosity="high").lifted == ("reasoning_effort", "verbosity")


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0}, {"presence_penalty": 1}, {"reasoning_effort": "low"}],
)
def test_a_strict_gateway_refuses_what_breaks_the_ratio(fields):
    with pytest.raises(ApiError) as caught:
        parse_chat(BODY | fields, is_strict=True)
    assert caught.value.param == next(iter(fields))
    assert parse_chat(BODY | {"top_p": 1, "temperature": 0.6}, is_strict=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["model", "messages", "tools", "stop", "n", "seed", "stream", "stream_options", "tool_choice", "logprobs"]
)


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_body_is_parsed_or_refused(fields):
    try:
        parse_chat(BODY | fields)
    except ApiError as error:
        assert error.status == 400
