"""Why a call has no reply: each error of this side as the `CallError` that travels to the agent."""

from agentjet.errors import (
    AgentJetError,
    BadRequestError,
    ContextLengthError,
    EngineError,
    ForeignKeyError,
    KeyRejectedError,
    ModelNotServedError,
    SupersededError,
)
from agentjet.schemas.call import CallError


class VersionUnavailableError(EngineError):
    """An evaluation is pinned to a version that this engine does not serve (any more)."""


class ReplyTooLargeError(BadRequestError):
    """The reply does not fit a message; asked for without log-probs, or with fewer tokens, it may."""


_ANSWERS: tuple[tuple[type[AgentJetError], int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (ReplyTooLargeError, 400, "reply_too_large"),
    (BadRequestError, 400, "invalid_request"),
    (ForeignKeyError, 403, "foreign_key"),
    (KeyRejectedError, 401, "invalid_api_key"),
    (ModelNotServedError, 404, "model_not_found"),
    (SupersededError, 409, "superseded"),
    (VersionUnavailableError, 503, "version_unavailable"),
    (EngineError, 503, "engine_error"),
)
"""First match wins, so subclasses come first."""

_PARAMS: dict[type[AgentJetError], str] = {
    ContextLengthError: "messages",
    BadRequestError: "messages",
    ModelNotServedError: "model",
    ReplyTooLargeError: "logprobs",
}
"""The field of the request that is at fault."""
_MAX_MESSAGE = 2_000

REFUSALS = tuple(kind for kind, _, _ in _ANSWERS)
"""Errors that are an answer to the caller, not a crash of the handler."""


def call_error(error: Exception) -> CallError:
    """The answer for an error; one that is no refusal is the engine's fault."""
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            param = _PARAMS.get(kind)
            return CallError(status=status, code=code, message=str(error)[:_MAX_MESSAGE], param=param)
    why = str(error)[:_MAX_MESSAGE]
    return CallError(status=503, code="engine_error", message=f"the call crashed here: {why}; it can be tried again")
