"""A body of Anthropic's Messages, checked, and that of its count of tokens.

`thinking` and `output_config.effort` tell a model whether and how much to think. A model without such a switch thinks
as its template has it, always in blocks of its own: these wishes are listed as lifted, so that the agent hears of it,
and refused where the gateway is strict. `adaptive` leaves it to the model, so it is no such wish.
"""

from collections.abc import Mapping
from typing import Any

from agentjet.gateway.fault import bad_field
from agentjet.gateway.field import (
    FieldRules,
    object_of,
    refuse_bending,
    refuse_hints,
    sampling_of,
    stop_strings,
    typed,
)
from agentjet.gateway.messages_block import messages_of, text_in
from agentjet.gateway.request import ModelRequest
from agentjet.gateway.tool import Tool, check_has_tools, check_tool_name, function_tool
from agentjet.schemas.call import ToolChoice
from agentjet.schemas.sampling import Sampling

_COUNTED = frozenset(("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"))
_HARMLESS = frozenset(("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id"))
_NEUTRAL = {"speed": ("standard",), "mcp_servers": ([],), "context_management": ({}, {"edits": []})}
_UNSUPPORTED = {
    "speed": 'only "standard" is supported',
    "container": "there are no tools that run here",
    "mcp_servers": "let the agent call them, and list their tools",
    "context_management": "a history that is rewritten is another branch; leave it out",
    "diagnostics": "usage tells which tokens of the prompt were at hand; leave it out",
}
_RULES = FieldRules(
    honoured=_COUNTED | {"max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream"},
    harmless=_HARMLESS,
    neutral=_NEUTRAL,
    unsupported=_UNSUPPORTED,
)
_COUNT_RULES = FieldRules(honoured=_COUNTED, harmless=_HARMLESS, neutral=_NEUTRAL, unsupported=_UNSUPPORTED)
_TOOL_FIELDS = frozenset(("type", "name", "description", "input_schema"))
_TOOL_HARMLESS = frozenset(("cache_control", "strict", "eager_input_streaming"))
_TOOL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_THINKING = {
    "adaptive": frozenset(("type", "display")),
    "enabled": frozenset(("type", "display", "budget_tokens")),
    "disabled": frozenset(("type",)),
    "between_tools": frozenset(("type",)),
}
_CHOICES = {"auto": ToolChoice.AUTO, "none": ToolChoice.NONE, "any": ToolChoice.REQUIRED, "tool": ToolChoice.REQUIRED}


def parse_messages(body: Any, *, is_strict: bool = False) -> ModelRequest:
    """The request in a decoded JSON body.

    Raises ApiError (400) that names the field.
    """
    fields = object_of(body)
    lifted, hints = _RULES.check(fields), _hints(fields)
    values = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
    values["max_tokens"] = typed(fields, "max_tokens", int, required=True)
    if "stop_sequences" in fields:
        values["stop"] = stop_strings(fields["stop_sequences"], "stop_sequences")
    sampling = sampling_of(values)
    if is_strict:
        refuse_bending(sampling, lifted)
        refuse_hints(hints)
    return _request(
        fields,
        sampling=sampling,
        given=tuple(values),
        lifted=(*lifted, *hints),
        is_streamed=typed(fields, "stream", bool, default=False),
    )


def parse_count(body: Any) -> ModelRequest:
    """The request to count its prompt's tokens.

    Raises ApiError (400) that names the field.
    """
    fields = object_of(body)
    _COUNT_RULES.check(fields)
    _hints(fields)
    return _request(fields, sampling=Sampling(), given=(), only_counts=True)


def _request(fields: Mapping[str, Any], **others: Any) -> ModelRequest:
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(typed(fields, "tools", list, default=[])))
    choice, name = _tool_choice(typed(fields, "tool_choice", dict, default={"type": "auto"}), tools)
    system = text_in(fields.get("system", ""), "system")
    opening = ({"role": "system", "content": system},) if system else ()
    return ModelRequest(
        model=typed(fields, "model", str, required=True),
        messages=(*opening, *messages_of(typed(fields, "messages", list, required=True))),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        **others,
    )


def _tool(tool: Any, where: str) -> Tool:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else type(tool).__name__
    if not isinstance(tool, Mapping) or kind not in ("custom", None):
        why = f"a tool of type {kind!r} is not supported; describe it by name and input_schema"
        raise bad_field(where, why, code="unsupported_parameter")
    for name, value in tool.items():
        is_known = name in _TOOL_FIELDS or name in _TOOL_HARMLESS or value is None
        if not is_known and value not in _TOOL_NEUTRAL.get(name, ()):
            raise bad_field(f"{where}.{name}", "not supported; leave it out", code="unsupported_parameter")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise bad_field(f"{where}.input_schema", "is missing or no object")
    shown = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return function_tool(shown, where)


def _tool_choice(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[ToolChoice, str]:
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_field("tool_choice.type", f"has to be one of {', '.join(_CHOICES)}, not {kind!r}")
    for name, value in choice.items():
        if name == "disable_parallel_tool_use" and value:
            why = "only false is supported: how many calls a reply makes is the model's choice"
            raise bad_field(f"tool_choice.{name}", why, code="unsupported_parameter")
        if name not in ("type", "name", "disable_parallel_tool_use") or (name == "name" and kind != "tool"):
            raise bad_field(f"tool_choice.{name}", "this field is not known here; leave it out")
    if kind == "tool":
        return ToolChoice.REQUIRED, check_tool_name(typed(choice, "name", str, required=True), tools)
    return check_has_tools(_CHOICES[kind], tools), ""


def _hints(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of wishes that this model has no switch for."""
    hints = ["thinking"] if _thinking(typed(fields, "thinking", dict, default={"type": "adaptive"})) else []
    for name, value in typed(fields, "output_config", dict, default={}).items():
        if value is None:
            continue
        if name != "effort":
            why = "not supported: a forced format is drawn from another distribution"
            raise bad_field(f"output_config.{name}", why, code="unsupported_parameter")
        hints.append("output_config.effort")
    return tuple(hints)


def _thinking(thinking: Mapping[str, Any]) -> bool:
    """Whether it asks for more than the model's own way."""
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise bad_field("thinking.type", f"has to be one of {', '.join(_THINKING)}, not {kind!r}")
    for name, value in thinking.items():
        if name not in _THINKING[kind] and value is not None:
            raise bad_field(f"thinking.{name}", f'not known with the type "{kind}"', code="unknown_parameter")
    if thinking.get("display") not in (None, "summarized"):
        why = "only the whole thinking can be given: the history has to come back with it"
        raise bad_field("thinking.display", why, code="unsupported_parameter")
    return kind != "adaptive"
