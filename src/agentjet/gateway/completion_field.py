"""Fields that OpenAI's chat completions and text completions have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agentjet.gateway.fault import bad_field
from agentjet.gateway.field import object_of, typed
from agentjet.gateway.request import ModelRequest

MAX_CHOICES = 64
LIFTED = frozenset(("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"))
"""They break the ratio of training."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
    }
)
"""Their values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ModelRequest):
    """What an agent asks for."""

    wants_usage: bool
    """A stream ends with a chunk of token counts."""


def num_choices(fields: Mapping[str, Any]) -> int:
    """`n`. ApiError (400) when it is out of range."""
    number = typed(fields, "n", int, default=1)
    if not 1 <= number <= MAX_CHOICES:
        raise bad_field("n", f"has to be from 1 to {MAX_CHOICES}")
    return number


def wants_usage(fields: Mapping[str, Any], *, is_streamed: bool) -> bool:
    """Whether a stream ends with the token counts. ApiError (400) that names the option."""
    options = object_of(typed(fields, "stream_options", dict, default={}))
    if options and not is_streamed:
        raise bad_field("stream_options", "only allowed with stream = true")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise bad_field(f"stream_options.{name}", "this field is not known here", code="unknown_parameter")
    return typed(options, "include_usage", bool, default=False)
