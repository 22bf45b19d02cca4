"""A body of OpenAI's Responses, checked.

Fields that only tell the model how much to think or write (`reasoning.effort`, `text.verbosity`) have no effect on a
model without such a switch. They are listed as lifted, so that the agent hears of it, and refused where the gateway is
strict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.gateway.fault import bad_field
from agentjet.gateway.field import (
    FieldRules,
    object_of,
    refuse_bending,
    refuse_hints,
    sampling_of,
    typed,
)
from agentjet.gateway.request import ModelRequest
from agentjet.gateway.responses_item import messages_of
from agentjet.gateway.tool import Tool, function_tool, tool_choice
from agentjet.schemas.sampling import Sampling

_RULES = FieldRules(
    honoured=frozenset(
        [
            "model",
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "temperature",
            "top_p",
            "max_output_tokens",
            "text",
            "reasoning",
            "include",
            "previous_response_id",
            "store",
            "stream",
            "stream_options",
        ]
    ),
    harmless=frozenset(
        [
            "metadata",
            "user",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "max_tool_calls",  # counts built-in tools only
        ]
    ),
    neutral={
        "parallel_tool_calls": (True,),
        "truncation": ("disabled",),
        "background": (False,),
        "top_logprobs": (0,),
    },
    unsupported={
        "parallel_tool_calls": "only true is supported",
        "truncation": 'only "disabled" is supported: a prompt that is too long is refused',
        "background": "only false is supported",
        "top_logprobs": "log-probs are given by /v1/chat/completions",
        "conversation": "use previous_response_id, or send the items",
        "prompt": "use instructions and input",
        "context_management": "a history that is rewritten is another branch; leave it out",
    },
)
_INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
"""They ask for parts of items that never occur here, or that are given in clear."""
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "reasoning",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ModelRequest):
    """What an agent asks for."""

    echo: Mapping[str, Any]
    """Fields of the body that the response repeats."""


def parse_responses(body: Any, *, is_strict: bool = False) -> ResponsesRequest:
    """The request in a decoded JSON body.

    Raises ApiError (400) that names the field.
    """
    fields = object_of(body)
    lifted = _RULES.check(fields)
    hints = _hints(fields)
    sampling, given = _sampling(fields)
    if is_strict:
        refuse_bending(sampling, lifted)
        refuse_hints(hints)
    _check_include(fields)
    tools = _tools(fields)
    choice, name = tool_choice(
        fields.get("tool_choice", "auto"),
        tools,
        named=lambda choice: choice.get("name"),
        form='{"type": "function", "name": ...}',
    )
    instructions = typed(fields, "instructions", str, default="")
    opening = ({"role": "system", "content": instructions},) if instructions else ()
    previous = typed(fields, "previous_response_id", str, default="")
    messages = (*opening, *messages_of(fields.get("input", [])))
    if not messages and not previous:
        raise bad_field("input", "there has to be at least one item", code="missing_required_parameter")
    return ResponsesRequest(
        model=typed(fields, "model", str, required=True),
        messages=messages,
        num_instructions=len(opening),
        previous=previous,
        is_remembered=typed(fields, "store", bool, default=True),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        sampling=sampling,
        given=given,
        lifted=(*lifted, *hints),
        is_streamed=typed(fields, "stream", bool, default=False),
        echo={name: fields[name] for name in _ECHOED if name in fields},
    )


def _sampling(fields: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    values = {name: fields[name] for name in ("temperature", "top_p") if name in fields}
    if "max_output_tokens" in fields:
        values["max_tokens"] = fields["max_output_tokens"]
    return sampling_of(values, spelt={"max_tokens": "max_output_tokens"}), tuple(values)


def _hints(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of wishes that this model has no switch for."""
    text = _parts(fields, "text", ("format", "verbosity"))
    if text.get("format", {"type": "text"}) != {"type": "text"}:
        why = 'only {"type": "text"} is supported: a forced format is drawn from another distribution'
        raise bad_field("text.format", why, code="unsupported_parameter")
    reasoning = _parts(fields, "reasoning", ("effort", "summary", "generate_summary"))
    hints = (("reasoning.effort", reasoning.get("effort")), ("text.verbosity", text.get("verbosity")))
    return tuple(name for name, value in hints if value is not None)


def _parts(fields: Mapping[str, Any], name: str, known: Sequence[str]) -> dict[str, Any]:
    parts = {part: value for part, value in typed(fields, name, dict, default={}).items() if value is not None}
    for part in parts:
        if part not in known:
            raise bad_field(f"{name}.{part}", "this field is not known here; leave it out", code="unknown_parameter")
    return parts


def _check_include(fields: Mapping[str, Any]) -> None:
    for what in typed(fields, "include", list, default=[]):
        if what == "message.output_text.logprobs":
            why = f"{what!r} is not supported; log-probs are given by /v1/chat/completions"
            raise bad_field("include", why, code="unsupported_parameter")
        if what not in _INCLUDABLE:
            raise bad_field("include", f"{what!r} is not known here; leave it out", code="unknown_parameter")
    _parts(fields, "stream_options", ("include_obfuscation",))


def _tools(fields: Mapping[str, Any]) -> tuple[Tool, ...]:
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(typed(fields, "tools", list, default=[])))


def _tool(tool: Any, where: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if not isinstance(tool, dict) or kind != "function":
        raise bad_field("tools", f"{where} is of type {kind!r}; only functions are supported")
    for name, value in tool.items():
        if name not in ("type", "name", "description", "parameters", "strict") and value is not None:
            raise bad_field(f"{where}.{name}", "this field is not known here; leave it out", code="unknown_parameter")
    return function_tool({name: tool.get(name) for name in ("name", "description", "parameters")}, where)
