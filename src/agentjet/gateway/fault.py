"""Errors as OpenAI's API shapes them."""

from typing import Any

from agentjet.errors import AgentJetError
from agentjet.schemas.call import CallError


class ApiError(AgentJetError, RuntimeError):
    """A request that has no answer: HTTP status, short code, sentence, and the parameter at fault."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @classmethod
    def of(cls, error: CallError) -> "ApiError":
        """The error that inference answered."""
        return cls(error.status, error.code, error.message, param=error.param)

    @property
    def is_worth_retrying(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (429, 503, 504) and self.code != "version_unavailable"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self._type(), "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Tells OpenAI's clients whether to try again by themselves."""
        return {"x-should-retry": "true" if self.is_worth_retrying else "false"}

    def _type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def bad_field(name: str, why: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, code, f"{name}: {why}", param=name)
