"""Claiming tickets: what a delivery from TASKS becomes after the claim service was asked."""

import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from agentjet.bus.handler import PostponeError
from agentjet.bus.protocol import Bus
from agentjet.bus.record import ask
from agentjet.schemas import subject
from agentjet.schemas.claim import ClaimGrant, ClaimRequest
from agentjet.schemas.ids import RunId
from agentjet.schemas.task import Ticket

BUSY_SECONDS = 2.0
"""Delay before a ticket whose claim could not be decided is handed out again."""
_CLAIM_SECONDS = 4.0
"""A granted claim takes milliseconds; what a curriculum had in hand when it was killed is never answered."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A ticket that is ours to play."""

    ticket: Ticket
    attempt: int
    key: str
    since: float = field(default_factory=time.monotonic)
    """Monotonic, not after the claim was stored."""

    @property
    def seconds_left(self) -> float:
        """Until the deadline, by the monotonic clock; negative when it has passed."""
        return self.since + self.ticket.deadline_seconds - time.monotonic()


class SpentError(PostponeError):
    """The ticket was claimed so often that nobody gets it any more; it is dead at its deadline."""


def worker_name() -> str:
    """`<host>-<pid>-<random>`, a token."""
    host = "".join(char if char.isascii() and char.isalnum() else "-" for char in socket.gethostname())
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"


async def claim(bus: Bus, run: RunId, ticket: Ticket, worker: str) -> Claimed | None:
    """Asks for a ticket; None when it is over or not of this run.

    Raises:
        SpentError: The ticket was claimed too often. It is a `PostponeError`, for whoever is handed it again and again
            until it is dead.
        PostponeError: The claim can not be decided now.
        BusError: Nobody answers.
    """
    question, asked = ClaimRequest(run=run, ticket=ticket.id, worker=worker), time.monotonic()
    grant = await ask(bus, subject.claim_service(run), question, ClaimGrant, timeout_seconds=_CLAIM_SECONDS)
    if grant.granted:
        return Claimed(ticket, grant.attempt, grant.key, asked)
    if grant.reason in ("ended", "unknown"):
        return None
    kind = SpentError if grant.reason == "spent" else PostponeError
    raise kind(f"{ticket.id}: the claim service says {grant.reason!r}", delay_seconds=BUSY_SECONDS)
