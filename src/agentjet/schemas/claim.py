"""CLAIMS and the claim service's question and answer."""

from typing import Annotated

from pydantic import Field

from agentjet.schemas.field import AsTuple
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record
from agentjet.schemas.task import Ticket


class ClaimRequest(Record):
    """A worker asks to play a ticket that it was handed."""

    schema_name = "claim_request"

    run: RunId
    ticket: str
    worker: str
    """Who plays: `<host>-<pid>-<random>`."""


class Claim(Record):
    """CLAIMS: a ticket has a player. Its stream sequence is the attempt."""

    schema_name = "claim"

    ticket: Ticket
    """Without its task."""
    worker: str
    number: Annotated[int, Field(ge=1)] = 1
    """How many claims of the ticket there are, with this one."""


class ClaimGrant(Record):
    """The claim service's answer."""

    schema_name = "claim_grant"

    ticket: str
    granted: bool
    reason: str = ""
    """Why not: "ended" (drop the ticket), "unknown" (not of this run, or not issued), "spent" (claimed too often, it is
    dead at its deadline), "busy" (ask again)."""
    attempt: int = 0
    """Stream sequence of the claim record."""
    key: str = ""
    """Signed API key of this attempt."""
    deadline: float = 0.0
    """JetStream time, seconds since the epoch, by which the episode has to have ended."""


class AuthorizeRequest(Record):
    """A gateway asks what a key may do."""

    schema_name = "authorize_request"

    key: str


class Authorization(Record):
    """What a key may do, or why nothing."""

    schema_name = "authorization"

    granted: bool
    reason: str = ""
    ticket: str = ""
    attempt: int = 0
    models: Annotated[tuple[str, ...], AsTuple] = ()
    """Models that the episode may call."""
    untrained: Annotated[tuple[str, ...], AsTuple] = ()
    """Those of them that it neither trains nor evaluates: a judge, a frozen opponent."""
    expires: float = Field(default=0.0)


class OfferRequest(Record):
    """A client with its own task asks for the tickets of one group (`offer.<pool>`)."""

    schema_name = "offer_request"

    run: RunId
    pool: str
    group: str
    """The client's name of the group: asking again returns the same tickets."""
    task: dict[str, object]
    size: Annotated[int, Field(ge=1)]
    worker: str


class OfferReply(Record):
    """The tickets, or why none now."""

    schema_name = "offer_reply"

    granted: bool
    reason: str = ""
    """"full": no room within the staleness bound, ask again; otherwise a sentence."""
    tickets: Annotated[tuple[Ticket, ...], AsTuple] = ()


class RetryRequest(Record):
    """Someone asks to play the task of a group with a dead slot once more."""

    schema_name = "retry_request"

    run: RunId
    group: str


class RetryReply(Record):
    """The new group, or why there is none now."""

    schema_name = "retry_reply"

    granted: bool
    reason: str = ""
    """"full": it waits for room within the staleness bound, ask again; "busy": ask again; otherwise a sentence."""
    group: str = ""
    """A group has one retry: asking again gives the same."""
