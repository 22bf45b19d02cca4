"""Fields of a request body, read with errors that name them; what the dialects share.

Invariant: nothing is dropped silently. Fields that bend the distribution beyond what `Sampling` says (penalties,
biases) break the ratio of training: they are lifted and listed, or refused where the gateway is strict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from agentjet.chat.message import ROLES, normalise
from agentjet.errors import BadRequestError
from agentjet.gateway.fault import ApiError, bad_field
from agentjet.schemas.sampling import Sampling

_MAX_SEED = 2**63
_MAX_STOPS, _MAX_STOP_CHARS = 64, 256
_CHECKED_FIELDS = frozenset({"tool_calls", "function_call", "audio"})
"""They are looked for at every token."""
_JSON_NAMES = {str: "text", bool: "boolean", int: "whole number", float: "number", list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class FieldRules:
    """What a dialect does with each field of its body."""

    honoured: frozenset[str]
    harmless: frozenset[str]
    """They label or route a request and change no token."""
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Values that ask for nothing, of fields that are not honoured."""
    lifted: frozenset[str] = frozenset()
    """They break the ratio of training."""
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a field is refused, or what to use in its place."""

    def check(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Refuses what is unknown or unsupported; returns the lifted fields. ApiError (400) that names the field."""
        lifted: list[str] = []
        for name, value in fields.items():
            if name in self.honoured or name in self.harmless or value in self.neutral.get(name, ()):
                continue
            if name in self.lifted:
                lifted.append(name)
            elif name in self.unsupported:
                why = f"not supported; {self.unsupported[name]}"
                raise bad_field(name, why, code="unsupported_parameter")
            else:
                raise bad_field(name, "this field is not known here; leave it out", code="unknown_parameter")
        return tuple(lifted)


def object_of(body: Any) -> dict[str, Any]:
    """The fields that a body sets; null sets none. ApiError (400) when it is no JSON object."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the body has to be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def typed(fields: Mapping[str, Any], name: str, kind: type, *, default: Any = None, required: bool = False) -> Any:
    """A field's value, of a JSON type. ApiError (400) when it is missing or of another type."""
    if name not in fields:
        if required:
            raise bad_field(name, "is missing", code="missing_required_parameter")
        return default
    value = fields[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_field(name, f"has to be a JSON {_JSON_NAMES[kind]}, not {type(value).__name__}")
    return value


def sampling_of(values: Mapping[str, Any], *, spelt: Mapping[str, str] | None = None) -> Sampling:
    """The sampling parameters; `spelt` maps names of `Sampling` to those of the body, for the error (ApiError 400)."""
    seed = values.get("seed", 0)
    if isinstance(seed, int) and not -_MAX_SEED <= seed < _MAX_SEED:
        raise bad_field("seed", "has to fit 64 bits")
    try:
        return Sampling(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise bad_field((spelt or {}).get(name, name), first["msg"]) from None


def stop_strings(value: Any, name: str = "stop") -> tuple[str, ...]:
    """One stop string or several. ApiError (400) otherwise."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise bad_field(name, "has to be a text or a list of texts, none of them empty")
    if len(strings) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARS for text in strings):
        raise bad_field(name, f"has to be at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARS} characters")
    return tuple(strings)


def refuse_bending(sampling: Sampling, lifted: Sequence[str]) -> None:
    """ApiError (400) for what breaks the ratio of training: what a strict gateway does."""
    neutral = {"top_p": sampling.top_p == 1, "top_k": sampling.top_k == 0, "temperature": sampling.temperature > 0}
    for name in (*lifted, *(name for name, is_neutral in neutral.items() if not is_neutral)):
        raise bad_field(
            name,
            "it breaks the ratio of training, and this gateway is strict (gateway.is_strict); leave it out",
            code="breaks_ratio",
        )


def refuse_hints(hints: Sequence[str]) -> None:
    """ApiError (400) for a wish that the model has no switch for: what a strict gateway does."""
    for name in hints:
        raise bad_field(
            name,
            "this model has no such switch, and this gateway is strict (gateway.is_strict); leave it out",
            code="unsupported_parameter",
        )


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message surely has a canonical form; to ask this costs a fraction of making it."""
    has_more = not message.keys().isdisjoint(_CHECKED_FIELDS) and any(map(message.get, _CHECKED_FIELDS))
    return message.get("role") in ROLES and isinstance(message.get("content"), str) and not has_more


def check_messages(messages: Sequence[dict[str, Any]], param: str = "messages") -> tuple[dict[str, Any], ...]:
    """OpenAI chat messages that a template can be asked to render. ApiError (400) otherwise."""
    if not all(isinstance(message, dict) for message in messages):
        raise bad_field(param, "each has to be an object with a role and content")
    if not messages:
        raise bad_field(param, "there has to be at least one", code="unsupported_message")
    try:
        for index, message in enumerate(messages):
            if not _is_plain(message):
                normalise(message, f"messages[{index}]")
    except BadRequestError as error:
        raise ApiError(400, "unsupported_message", str(error), param=param) from None
    return tuple(messages)
