"""Every field of a Messages body is honoured, harmless, lifted, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.gateway.fault import ApiError
from agentjet.gateway.messages_request import parse_count, parse_messages
from agentjet.schemas.call import ToolChoice
from agentjet.schemas.sampling import Sampling

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def parse(**fields):
    return parse_messages(BODY | fields)


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_sampling_fields_are_taken_and_named():
    request = parse(temperature=1, top_p=0.9, top_k=4, stop_sequences=["x"])
    assert request.sampling == Sampling(temperature=1.0, top_p=0.9, top_k=4, max_tokens=9, stop=("x",))
    assert set(request.given) == {"temperature", "top_p", "top_k", "max_tokens", "stop"}


def test_max_tokens_is_required():
    with pytest.raises(ApiError, match="max_tokens: is missing"):
        parse_messages({name: BODY[name] for name in ("model", "messages")})


def test_the_system_prompt_comes_first_as_text_or_blocks():
    blocks = [
        {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    assert parse(system="be brief").messages == parse(system=blocks).messages
    assert parse(system="be brief").messages[0] == {"role": "system", "content": "be brief"}
    assert parse(system=[]) == parse(system="") == parse()


@pytest.mark.parametrize("name", ["private", "guided_json", "prompt", "n"])
def test_a16_an_unknown_field_is_refused_by_name(name):
    error = refused(**{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"service_tier": "auto"},
        {"cache_control": {"type": "ephemeral"}},
        {"thinking": {"type": "adaptive"}},
        {"speed": "standard"},
        {"container": None},
        {"mcp_servers": []},
        {"tools": []},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
        {"output_config": {}},
    ],
)
def test_fields_that_change_no_token_are_accepted(fields):
    assert parse(**fields) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{}]}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "tools[0]"),
        ({"tools": ["add"]}, "tools[0]"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "add"}}, "tool_choice.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stream": "yes"}, "stream"),
        ({"messages": "q"}, "messages"),
        ({"model": 3}, "model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, param):
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("choice", "expected", "name"),
    [
        ({"type": "auto"}, ToolChoice.AUTO, ""),
        ({"type": "none"}, ToolChoice.NONE, ""),
        ({"type": "any"}, ToolChoice.REQUIRED, ""),
        ({"type": "tool", "name": "add"}, ToolChoice.REQUIRED, "add"),
    ],
)
def test_tools_read_as_functions_whatever_the_choice(choice, expected, name):
    tool = TOOL | {"type": "custom", "description": "adds", "strict": True, "cache_control": {"type": "ephemeral"}}
    request = parse(tools=[tool], tool_choice=choice)
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert request.tools == ({"type": "function", "function": function},)
    assert (request.tool_choice, request.tool_name) == (expected, name)


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_a_wish_without_a_switch_is_listed_and_refused_where_strict(fields, hint):
    assert parse(**fields).lifted == (hint,)
    with pytest.raises(ApiError) as caught:
        parse_messages(BODY | fields, is_strict=True)
    assert caught.value.param == hint


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0}])
def test_l3_a_strict_gateway_refuses_what_breaks_the_ratio(fields):
    with pytest.raises(ApiError) as caught:
        parse_messages(BODY | fields, is_strict=True)
    assert caught.value.param == next(iter(fields))


def test_a_count_needs_no_limit_and_takes_none():
    body = {"model": "m", "messages": BODY["messages"], "system": "s", "tools": [TOOL]}
    assert parse_count(body).only_counts
    assert parse_count(body).messages == parse(system="s").messages
    with pytest.raises(ApiError, match="max_tokens"):
        parse_count(BODY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["model", "messages", "system", "tools", "stop_sequences", "thinking", "tool_choice", "output_config", "stream"]
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"]) | JSON},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error"), JSON),
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": JSON | st.lists(BLOCKS, max_size=3)}
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.lists(TURNS, min_size=1, max_size=3))
def test_any_body_is_parsed_or_refused(fields, turns):
    for body in (BODY | fields, BODY | {"messages": turns}):
        try:
            parse_messages(body)
        except ApiError as error:
            assert error.status == 400
