"""Every field of a Responses body is honoured, harmless, listed as without effect, or refused by name."""

import pytest

from agentjet.gateway.fault import ApiError
from agentjet.gateway.responses_request import parse_responses
from agentjet.schemas.call import ToolChoice
from agentjet.schemas.sampling import Sampling

BODY = {"model": "m", "input": "q"}
TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
SHOWN = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def parse(*, is_strict=False, **fields):
    return parse_responses(BODY | fields, is_strict=is_strict)


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_sampling_fields_are_taken_and_named():
    request = parse(temperature=1, top_p=0.9, max_output_tokens=8)
    assert request.sampling == Sampling(temperature=1.0, top_p=0.9, max_tokens=8)
    assert set(request.given) == {"temperature", "top_p", "max_tokens"}
    assert parse().given == ()


def test_instructions_come_first_and_are_not_inherited():
    request = parse(instructions="be brief")
    assert request.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "q"})
    assert (request.num_instructions, parse().num_instructions) == (1, 0)


def test_a_tool_is_shown_as_in_a_chat_without_the_vendor_s_promise():
    assert parse(tools=[TOOL]).tools == (SHOWN,)
    assert parse(tools=[TOOL]).echo["tools"] == [TOOL]


def test_a_tool_choice_is_passed_on():
    assert parse(tools=[TOOL], tool_choice="none").tool_choice is ToolChoice.NONE
    named = parse(tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert (named.tool_choice, named.tool_name) == (ToolChoice.REQUIRED, "add")


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "truncation": "disabled", "parallel_tool_calls": True, "background": False},
        {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "x", "service_tier": "auto"},
        {"text": {"format": {"type": "text"}}, "reasoning": {"summary": "auto"}, "max_tool_calls": 3},
        {"stream_options": {"include_obfuscation": False}, "top_logprobs": 0},
    ],
)
def test_fields_that_change_no_token_are_accepted(fields):
    assert (parse(**fields).sampling, parse(**fields).lifted) == (parse().sampling, ())


def test_a_wish_that_the_model_has_no_switch_for_is_named_and_refused_where_the_gateway_is_strict():
    wishes = {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}
    assert parse(**wishes).lifted == ("reasoning.effort", "text.verbosity")
    assert refused(**wishes, is_strict=True).param == "reasoning.effort"
    assert refused(top_p=0.5, is_strict=True).param == "top_p"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": ["x"]}, "include"),
        ({"include": [[]]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"text": {"tone": "x"}}, "text.tone"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"instructions": ["x"]}, "instructions"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": None, "previous_response_id": 3}, "previous_response_id"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"store": "yes"}, "store"),
    ],
)
def test_a_field_that_can_not_be_honoured_is_refused_by_name(fields, param):
    assert refused(**fields).param == param


@pytest.mark.parametrize("name", ["private", "messages", "stop", "max_tokens"])
def test_a16_an_unknown_field_of_a_response_is_refused_by_name(name):
    error = refused(**{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")


def test_the_input_may_be_left_out_behind_an_earlier_response():
    assert parse(input=None, previous_response_id="resp_1").messages == ()
