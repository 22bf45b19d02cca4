"""A chat completion body, checked: every field is honoured, known to be harmless, or refused by name.

Invariant: nothing is dropped silently. Fields that bend the distribution beyond what `Sampling` says (penalties,
biases) break the ratio of training: they are lifted and listed in `lifted`, or refused where the gateway is strict.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentjet.chat.message import normalise_all
from agentjet.errors import BadRequestError
from agentjet.gateway.fault import ApiError, bad_field
from agentjet.schemas.sampling import Sampling

MAX_CHOICES = 64
_MAX_SEED = 2**63

_HONOURED = frozenset(
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
    ]
)
_HARMLESS = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)
"""They label or route a request and change no token."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
}
"""Values that ask for nothing."""
_LIFTED = frozenset(("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"))
_NOT_YET = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "parallel_tool_calls": "only true is supported",
    "modalities": 'only ["text"] is supported',
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What an agent asks for."""

    model: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    sampling: Sampling
    given: tuple[str, ...]
    """Fields of `sampling` that the body sets."""
    lifted: tuple[str, ...]
    """Fields that were set and do not take effect, because they break the ratio."""
    num_choices: int
    is_streamed: bool
    wants_usage: bool
    """A stream ends with a chunk of token counts."""
    wants_logprobs: bool


def parse_chat(body: Any, *, is_strict: bool = False) -> ChatRequest:
    """The request in a decoded JSON body.

    Raises ApiError (400) that names the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the body has to be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    lifted = _check_names(fields)
    sampling, given = _sampling(fields)
    if is_strict:
        _refuse_bending(sampling, lifted)
    return ChatRequest(
        model=_typed(fields, "model", str, required=True),
        messages=_messages(fields),
        tools=_tools(fields),
        sampling=sampling,
        given=given,
        lifted=lifted,
        num_choices=_num_choices(fields),
        is_streamed=_typed(fields, "stream", bool, default=False),
        wants_usage=_wants_usage(fields),
        wants_logprobs=_wants_logprobs(fields),
    )


def _check_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuses what is unknown or unsupported; returns the lifted fields."""
    lifted = []
    for name, value in fields.items():
        if name in _HONOURED or name in _HARMLESS or value in _NEUTRAL.get(name, ()):
            continue
        if name in _LIFTED:
            lifted.append(name)
        elif name in _NOT_YET:
            raise bad_field(name, f"not supported; {_NOT_YET[name]}", code="unsupported_parameter")
        else:
            raise bad_field(name, "this field is not known here; leave it out", code="unknown_parameter")
    return tuple(lifted)


def _refuse_bending(sampling: Sampling, lifted: tuple[str, ...]) -> None:
    neutral = {"top_p": sampling.top_p == 1, "top_k": sampling.top_k == 0, "temperature": sampling.temperature > 0}
    for name in (*lifted, *(name for name, is_neutral in neutral.items() if not is_neutral)):
        raise bad_field(
            name,
            "it breaks the ratio of training, and this gateway is strict (gateway.is_strict); leave it out",
            code="breaks_ratio",
        )


def _sampling(fields: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    values = {name: fields[name] for name in ("temperature", "top_p", "top_k", "seed") if name in fields}
    # The newer name wins, as in OpenAI's API.
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            values["max_tokens"] = fields[name]
    if "stop" in fields:
        values["stop"] = _stop(fields["stop"])
    seed = values.get("seed", 0)
    if isinstance(seed, int) and not -_MAX_SEED <= seed < _MAX_SEED:
        raise bad_field("seed", "has to fit 64 bits")
    try:
        return Sampling(**values), tuple(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if name == "max_tokens" and "max_completion_tokens" in fields:
            name = "max_completion_tokens"
        raise bad_field(name, first["msg"]) from None


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise bad_field("stop", "has to be a text or a list of texts, none of them empty")
    return tuple(strings)


def _messages(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    messages = _typed(fields, "messages", list, required=True)
    if not all(isinstance(message, dict) for message in messages):
        raise bad_field("messages", "each has to be an object with a role and content")
    try:
        normalise_all(messages)
    except BadRequestError as error:
        raise ApiError(400, "unsupported_message", str(error), param="messages") from None
    return tuple(messages)


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        why = 'only "auto" and "none" are supported: a forced call is drawn from another distribution'
        raise bad_field("tool_choice", why, code="unsupported_parameter")
    form = fields.get("response_format", {"type": "text"})
    if form != {"type": "text"}:
        why = 'only {"type": "text"} is supported: a forced format is drawn from another distribution'
        raise bad_field("response_format", why, code="unsupported_parameter")
    tools = _typed(fields, "tools", list, default=[])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field("tools", f"tools[{index}] is not a named function; only functions are supported")
    return () if choice == "none" else tuple(tools)


def _num_choices(fields: Mapping[str, Any]) -> int:
    number = _typed(fields, "n", int, default=1)
    if not 1 <= number <= MAX_CHOICES:
        raise bad_field("n", f"has to be from 1 to {MAX_CHOICES}")
    return number


def _wants_usage(fields: Mapping[str, Any]) -> bool:
    options = _typed(fields, "stream_options", dict, default={})
    if options and not fields.get("stream"):
        raise bad_field("stream_options", "only allowed with stream = true")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise bad_field(f"stream_options.{name}", "this field is not known here", code="unknown_parameter")
    return bool(options.get("include_usage"))


def _wants_logprobs(fields: Mapping[str, Any]) -> bool:
    if _typed(fields, "top_logprobs", int, default=0):
        why = "alternatives are not supported; logprobs = true gives those of the sampled tokens"
        raise bad_field("top_logprobs", why, code="unsupported_parameter")
    return _typed(fields, "logprobs", bool, default=False)


def _typed(fields: Mapping[str, Any], name: str, kind: type, *, default: Any = None, required: bool = False) -> Any:
    if name not in fields:
        if required:
            raise bad_field(name, "is missing", code="missing_required_parameter")
        return default
    value = fields[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_field(name, f"has to be a JSON {_JSON_NAMES[kind]}, not {type(value).__name__}")
    return value


_JSON_NAMES = {str: "text", bool: "boolean", int: "whole number", list: "list", dict: "object"}
