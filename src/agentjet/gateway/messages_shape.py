"""What whole and streamed answers of Anthropic's Messages have in common."""

from typing import Any

from agentjet.gateway.dialect import Body
from agentjet.gateway.fault import ApiError
from agentjet.schemas.call import FinishReason, InferReply, Usage

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOPS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    # A cancelled call has no caller; if one reads it all the same, it reads as cut.
    FinishReason.CANCELLED: "max_tokens",
}


def message_head(model: str, response_id: str) -> Body:
    """The fields of a message that are known before it."""
    return {"id": f"msg_{response_id}", "type": "message", "role": "assistant", "model": model}


def stop_fields(reply: InferReply) -> Body:
    """Why the reply ended, and at which stop sequence if at one."""
    at_sequence = bool(reply.stop_string) and reply.finish_reason is FinishReason.STOP
    return {
        "stop_reason": "stop_sequence" if at_sequence else _STOPS[reply.finish_reason],
        "stop_sequence": reply.stop_string if at_sequence else None,
    }


def usage_shape(usage: Usage) -> Body:
    """Token counts; a prompt's cached tokens are not among its `input_tokens` in this API."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_shape(error: ApiError) -> Body:
    """The body of an error."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    text = str(error)
    if error.code == "context_length_exceeded":  # agents know by these words that they have to shorten their history
        text = f"prompt is too long: {text}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": text}}
    return body | ({"request_id": error.request_id} if error.request_id else {})
