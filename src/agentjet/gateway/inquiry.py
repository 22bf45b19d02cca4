"""A request on its way to an answer: who asks, what for, and the calls that will answer."""

from dataclasses import dataclass, field

from agentjet.gateway.dialect import Dialect
from agentjet.gateway.exchange import Seat
from agentjet.gateway.request import ModelRequest
from agentjet.gateway.session import Session
from agentjet.schemas.call import InferReply
from agentjet.schemas.claim import Authorization
from agentjet.schemas.ids import CallId


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the request's headers say."""

    key: str
    agent: str = ""
    """Name of the sub-agent."""
    idempotency_key: str = ""
    is_retry: bool = False
    """The vendors' clients mark a request that they send again."""


@dataclass(slots=True)
class Inquiry:
    """A checked request."""

    caller: Caller
    session: Session
    dialect: Dialect
    request: ModelRequest
    access: Authorization
    digest: str
    """Equal for equal bodies of one agent in one dialect."""
    calls: list[CallId] = field(default_factory=list[CallId])
    """One for each choice."""
    known: dict[CallId, InferReply] = field(default_factory=dict[CallId, InferReply])
    """Replies of finished calls that this request is a retry of."""
    seats: dict[CallId, Seat] = field(default_factory=dict[CallId, Seat])
    """Held among those who wait for calls that this request is a retry of."""

    def lost(self) -> None:
        """The caller went away before its answer: a marked retry may have these calls."""
        self.session.undelivered[self.digest] = self.calls
