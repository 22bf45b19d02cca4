"""A body of OpenAI's Chat Completions, checked.

The model has no switch for `reasoning_effort` and `verbosity`: they are listed as lifted, so that the agent hears of
it, and refused where the gateway is strict.
"""

from collections.abc import Mapping
from typing import Any

from agentjet.gateway.completion_field import LIFTED, NEUTRAL, CompletionRequest, num_choices, wants_usage
from agentjet.gateway.fault import bad_field
from agentjet.gateway.field import (
    FieldRules,
    check_messages,
    object_of,
    refuse_bending,
    refuse_hints,
    sampling_of,
    stop_strings,
    typed,
)
from agentjet.gateway.tool import Tool, function_tool, tool_choice
from agentjet.schemas.sampling import Sampling

_RULES = FieldRules(
    honoured=frozenset(
        [
            "model",
            "messages",
            "tools",
            "tool_choice",
            "temperature",
            "top_p",
            "top_k",
            "max_tokens",
            "max_completion_tokens",
            "stop",
            "seed",
            "n",
            "stream",
            "stream_options",
            "logprobs",
            "top_logprobs",
            "response_format",
            "reasoning_effort",
            "verbosity",
        ]
    ),
    harmless=frozenset(
        ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
    ),
    neutral={
        "parallel_tool_calls": (True,),
        "modalities": (["text"],),
        **NEUTRAL,
    },
    lifted=LIFTED,
    unsupported={
        "functions": "use tools",
        "function_call": "use tool_choice",
        "parallel_tool_calls": "only true is supported",
        "modalities": 'only ["text"] is supported',
    },
)


def parse_chat(body: Any, *, is_strict: bool = False) -> CompletionRequest:
    """The request in a decoded JSON body.

    Raises ApiError (400) that names the field.
    """
    fields = object_of(body)
    lifted = _RULES.check(fields)
    sampling, given = _sampling(fields)
    hints = tuple(name for name in ("reasoning_effort", "verbosity") if name in fields)
    if is_strict:
        refuse_bending(sampling, lifted)
        refuse_hints(hints)
    _check_format(fields)
    tools = _tools(fields)
    form = '{"type": "function", "function": {"name": ...}}'
    choice, name = tool_choice(fields.get("tool_choice", "auto"), tools, named=_name_in, form=form)
    is_streamed = typed(fields, "stream", bool, default=False)
    return CompletionRequest(
        model=typed(fields, "model", str, required=True),
        messages=check_messages(typed(fields, "messages", list, required=True)),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        sampling=sampling,
        given=given,
        lifted=(*lifted, *hints),
        num_choices=num_choices(fields),
        is_streamed=is_streamed,
        wants_usage=wants_usage(fields, is_streamed=is_streamed),
        wants_logprobs=_wants_logprobs(fields),
    )


def _sampling(fields: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    values = {name: fields[name] for name in ("temperature", "top_p", "top_k", "seed") if name in fields}
    spelt = {}
    # The newer name wins, as in OpenAI's API.
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            values["max_tokens"], spelt["max_tokens"] = fields[name], name
    if "stop" in fields:
        values["stop"] = stop_strings(fields["stop"])
    return sampling_of(values, spelt=spelt), tuple(values)


def _check_format(fields: Mapping[str, Any]) -> None:
    form = fields.get("response_format", {"type": "text"})
    if form != {"type": "text"}:
        why = 'only {"type": "text"} is supported: a forced format is drawn from another distribution'
        raise bad_field("response_format", why, code="unsupported_parameter")


def _tools(fields: Mapping[str, Any]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, tool in enumerate(typed(fields, "tools", list, default=[])):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise bad_field("tools", f"tools[{index}] is no function; only functions are supported")
        tools.append({**tool, **function_tool(function, f"tools[{index}].function")})
    return tuple(tools)


def _name_in(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _wants_logprobs(fields: Mapping[str, Any]) -> bool:
    if typed(fields, "top_logprobs", int, default=0):
        why = "alternatives are not supported; logprobs = true gives those of the sampled tokens"
        raise bad_field("top_logprobs", why, code="unsupported_parameter")
    return typed(fields, "logprobs", bool, default=False)
