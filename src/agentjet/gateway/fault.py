"""Errors of the gateway, and how OpenAI's API shapes them."""

from typing import Any

from agentjet.errors import AgentJetError
from agentjet.schemas.call import CallError

RETRY_AFTER_SECONDS = 1
"""A server or an actor that was killed is back within a few of them."""


class ApiError(AgentJetError, RuntimeError):
    """A request that has no answer: HTTP status, short code, sentence, and the parameter at fault."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.request_id = ""
        """Of the HTTP request that it answers."""

    @classmethod
    def of(cls, error: CallError) -> "ApiError":
        """The error that inference answered."""
        return cls(error.status, error.code, error.message, param=error.param)

    @property
    def is_worth_retrying(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (429, 503, 504) and self.code != "version_unavailable"

    def headers(self) -> dict[str, str]:
        """Tells the vendors' clients whether to try again by themselves, and any client after how many seconds."""
        if not self.is_worth_retrying:
            return {"x-should-retry": "false"}
        return {"x-should-retry": "true", "retry-after": str(RETRY_AFTER_SECONDS)}


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error of OpenAI's API."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def bad_field(name: str, why: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, code, f"{name}: {why}", param=name)
