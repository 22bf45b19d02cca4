"""The curriculum's services: claims, key checks, tickets for clients with tasks of their own, retries of the dead.

Invariants:

- A claim is granted only for a current ticket without an end; the claim record's sequence is the attempt.
- Claims of a ticket are compare-and-set on one another, so attempts rise and exactly one is the newest.
- A ticket is given out at most `MAX_CLAIMS` times; then askers hear "spent" until it is buried at the last deadline.
- Trouble with the bus is answered "busy": the asker tries again.

Secrets stay here: what leaves is a signed key.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from agentjet.accounting.key import Key, sign, verify
from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import answering, last, put, read_as
from agentjet.curriculum.board import Board, LiveClaim
from agentjet.errors import BusError, ConflictError, KeyRejectedError
from agentjet.schemas import subject
from agentjet.schemas.claim import (
    Authorization,
    AuthorizeRequest,
    Claim,
    ClaimGrant,
    ClaimRequest,
    OfferReply,
    OfferRequest,
    RetryReply,
    RetryRequest,
)
from agentjet.schemas.ids import RunId, TicketName
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

log = structlog.get_logger(__name__)

QUEUE = "curriculum"
_MAX_TRIES = 8

Offer = Callable[[OfferRequest], Awaitable[OfferReply]]
Retry = Callable[[RetryRequest], Awaitable[RetryReply]]


class ClaimDesk:
    """Grants claims and checks keys.

    Args:
        served_models: Models that an episode may call beside those of its ticket.
    """

    def __init__(
        self, bus: Bus, run: RunId, board: Board, clock: BusClock, secret: bytes, *, served_models: tuple[str, ...] = ()
    ) -> None:
        self._bus, self._run, self._board, self._clock = bus, run, board, clock
        self._secret, self._served_models = secret, served_models
        self.num_granted = 0

    async def claim(self, request: ClaimRequest) -> ClaimGrant:
        """Grant a ticket to a worker, or say why not."""
        ticket = self._board.find(request.ticket) if request.run == self._run else "unknown"
        if isinstance(ticket, str):
            return ClaimGrant(ticket=request.ticket, granted=False, reason=ticket)
        try:
            return await self._claim(ticket, request.worker)
        except BusError as error:
            log.warning("a claim has to wait", ticket=ticket.id, error=str(error))
            return ClaimGrant(ticket=ticket.id, granted=False, reason="busy")

    async def _claim(self, ticket: Ticket, worker: str) -> ClaimGrant:
        for _ in range(_MAX_TRIES):
            # Looked up again after a conflict: the claim that was not known here may have an end.
            if self._board.may_have_ended(ticket) and await self._has_ended(ticket):
                return ClaimGrant(ticket=ticket.id, granted=False, reason="ended")
            known = self._board.claims.get(ticket.id)
            if known is not None and known.is_last:
                return ClaimGrant(ticket=ticket.id, granted=False, reason="spent")
            claim = await self._append(ticket, worker, known)
            if claim is not None:
                self.num_granted += 1
                return self._grant(ticket, claim)
        raise BusError(f"{ticket.id}: others claimed it {_MAX_TRIES} times in between")

    async def _has_ended(self, ticket: Ticket) -> bool:
        if ticket.id not in self._board.ended:
            name = stream_name(self._run, Stream.EPISODES)
            if await self._bus.last(name, subject.episode(self._run, ticket.id)) is None:
                return False
            self._board.end(ticket.id)
        return True

    def _grant(self, ticket: Ticket, claim: LiveClaim) -> ClaimGrant:
        key = sign(self._secret, Key(self._run, ticket.id, claim.attempt, claim.deadline))
        return ClaimGrant(ticket=ticket.id, granted=True, attempt=claim.attempt, key=key, deadline=claim.deadline)

    async def _append(self, ticket: Ticket, worker: str, known: LiveClaim | None) -> LiveClaim | None:
        """A claim on top of the known one; None when there is a newer one, which the board knows then."""
        to = subject.claim(self._run, ticket.id)
        number, expected = (known.number + 1, known.attempt) if known else (1, 0)
        claim = Claim(ticket=ticket.without_task(), worker=worker, number=number)
        # Not after the record's own time, which would take another request to learn.
        deadline = self._clock.now() + ticket.deadline_seconds
        try:
            attempt = await put(self._bus, self._run, Stream.CLAIMS, to, claim, expected=expected)
        except ConflictError:
            newest = await self._bus.last(stream_name(self._run, Stream.CLAIMS), to)
            if newest is not None:
                await self._learn_of(newest)
            return None
        self._board.claim(ticket.id, attempt, deadline, number)
        return LiveClaim(attempt, deadline, number)

    async def _learn_of(self, message: StoredMessage) -> None:
        """Tell the board of a stored claim, unless it knows a newer one."""
        record = await read_as(Claim, self._bus, self._run, Stream.CLAIMS, message)
        self._clock.observe(message.time)
        known = self._board.claims.get(record.ticket.id)
        if known is None or known.attempt < message.sequence:
            deadline = message.time + record.ticket.deadline_seconds
            self._board.claim(record.ticket.id, message.sequence, deadline, record.number)

    async def authorize(self, request: AuthorizeRequest) -> Authorization:
        """What a key may do: genuine, not expired, and of the newest claim of its ticket."""
        try:
            key = verify(self._secret, request.key, run=self._run, now=self._clock.now())
            name = TicketName.parse(key.ticket)
        except (KeyRejectedError, ValueError) as error:
            return Authorization(granted=False, reason=str(error))
        try:
            newest = await last(Claim, self._bus, self._run, Stream.CLAIMS, subject.claim(self._run, name.id))
        except BusError as error:
            log.warning("a key check has to wait", ticket=key.ticket, error=str(error))
            return Authorization(granted=False, reason="busy", ticket=key.ticket, attempt=key.attempt)
        if newest is None or newest[0] != key.attempt:
            return Authorization(granted=False, reason="superseded", ticket=key.ticket, attempt=key.attempt)
        played = newest[1].ticket.models
        untrained = tuple(name for name in self._served_models if name not in played)
        return Authorization(
            granted=True,
            ticket=key.ticket,
            attempt=key.attempt,
            models=(*played, *untrained),
            untrained=untrained,
            expires=key.expires,
        )


@asynccontextmanager
async def serving(
    bus: Bus, run: RunId, desk: ClaimDesk, offer: Offer, retry: Retry, pools: tuple[str, ...]
) -> AsyncGenerator[None]:
    """Answer requests while the context is open; `offer` answers those of clients with own tasks."""
    handlers = {
        subject.claim_service(run): answering(ClaimRequest, desk.claim),
        subject.authorize_service(run): answering(AuthorizeRequest, desk.authorize),
        subject.retry_service(run): answering(RetryRequest, retry),
    }
    handlers |= {subject.offer_service(run, pool): answering(OfferRequest, offer) for pool in pools}
    async with AsyncExitStack() as stack:
        for of, handler in handlers.items():
            await stack.enter_async_context(bus.serve(of, handler, queue=QUEUE))
        yield
