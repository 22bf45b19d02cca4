"""Function tools and the choice among them, in the one form that every dialect hands on.

Invariant: the same tool is the same prompt, whichever dialect it came in: a `function` with its name, its description
and its parameters. `strict` is a promise of the vendors' about their own models; it is not shown to this one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentjet.gateway.fault import bad_field
from agentjet.schemas.call import ToolChoice

Tool = dict[str, Any]
_NAME = re.compile(r'[^\s"\\<>{}\[\]|｜]{1,256}')
"""What can be read again in every family's spelling of a call."""


def function_tool(function: Mapping[str, Any], where: str) -> Tool:
    """As OpenAI's chat writes it, which templates read. ApiError (400) that names the field below `where`."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "has to be a text of 1 to 256 characters without white space, quotes, backslashes, bars and brackets"
        raise bad_field(f"{where}.name", why)
    if not isinstance(function.get("description"), str | None):
        raise bad_field(f"{where}.description", "has to be a text")
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_field(f"{where}.parameters", "has to be an object")
    shown = {field: value for field, value in function.items() if value is not None and field != "strict"}
    return {"type": "function", "function": shown}


def tool_choice(
    choice: Any, tools: Sequence[Tool], *, named: Callable[[Mapping[str, Any]], Any], form: str
) -> tuple[ToolChoice, str]:
    """OpenAI's `tool_choice`: a word or an object; the tool's name where one has to be called.

    `named` finds the name in an object of type `function`, `form` shows such an object. ApiError (400) otherwise.
    """
    if isinstance(choice, dict):
        name = named(choice) if choice.get("type") == "function" else None
        if not isinstance(name, str):
            raise bad_field("tool_choice", f"an object has to be {form}")
        return ToolChoice.REQUIRED, check_tool_name(name, tools)
    if choice not in ("auto", "none", "required"):
        raise bad_field("tool_choice", 'has to be "auto", "none", "required" or a named function')
    return check_has_tools(ToolChoice(choice), tools), ""


def check_has_tools(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """ApiError (400) when a call is required and there is nothing to call."""
    if choice is ToolChoice.REQUIRED and not tools:
        raise bad_field("tool_choice", "to require a call there have to be tools")
    return choice


def check_tool_name(name: str, tools: Sequence[Tool]) -> str:
    """The name of a tool that has to be called. ApiError (400) when there is no such tool."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise bad_field("tool_choice", f"there is no tool {name!r}; there are: {', '.join(names) or 'none'}")
    return name
