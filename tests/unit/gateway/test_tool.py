"""Tools and the choice among them are the same in every dialect."""

import pytest

from agentjet.gateway.chat_request import parse_chat
from agentjet.gateway.fault import ApiError
from agentjet.gateway.messages_request import parse_messages
from agentjet.gateway.responses_request import parse_responses
from agentjet.schemas.call import ToolChoice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAYS = [{"role": "user", "content": "q"}]


def chat(choice, **tool):
    function = {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True} | tool
    choice = {"type": "function", "function": {"name": "add"}} if choice == "add" else choice
    tools = [{"type": "function", "function": function}]
    return parse_chat({"model": "m", "messages": SAYS, "tools": tools, "tool_choice": choice})


def responses(choice, **tool):
    tools = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True} | tool]
    choice = {"type": "function", "name": "add"} if choice == "add" else choice
    return parse_responses({"model": "m", "input": "q", "tools": tools, "tool_choice": choice})


def messages(choice, **tool):
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA, "strict": True} | tool]
    kind = {"required": "any", "add": "tool"}.get(choice, choice)
    choice = {"type": kind} | ({"name": "add"} if choice == "add" else {})
    return parse_messages({"model": "m", "max_tokens": 8, "messages": SAYS, "tools": tools, "tool_choice": choice})


DIALECTS = [chat, responses, messages]


@pytest.mark.parametrize("parse", DIALECTS)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice.AUTO),
        ("none", ToolChoice.NONE),
        ("required", ToolChoice.REQUIRED),
        ("add", ToolChoice.REQUIRED),
    ],
)
def test_a_tool_and_a_choice_are_the_same_whichever_dialect_they_come_in(parse, choice, expected):
    request = parse(choice)
    function = {"name": "add", "description": "adds", "parameters": SCHEMA}
    assert request.tools == ({"type": "function", "function": function},)
    assert (request.tool_choice, request.tool_name) == (expected, "add" if choice == "add" else "")
    assert "description" not in parse(choice, description=None).tools[0]["function"]


@pytest.mark.parametrize("parse", DIALECTS)
@pytest.mark.parametrize("name", ["", "a b", 'a"', "a\n", "<a>", "x" * 257, None, 3])
def test_a_name_that_no_call_could_spell_is_refused(parse, name):
    with pytest.raises(ApiError, match="name: has to be") as caught:
        parse("auto", name=name)
    assert (caught.value.status, caught.value.param.startswith("tools[0]")) == (400, True)


@pytest.mark.parametrize("parse", DIALECTS)
def test_a_description_is_a_text(parse):
    with pytest.raises(ApiError, match="description: has to be a text"):
        parse("auto", description=["adds"])
