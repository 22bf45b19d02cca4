"""Healing: what was lost between two writes is written again, and what can not end is buried.

- A ticket past its deadline gets the end "dead" (create-only: an end that is stored already wins). Each claim sets the
  deadline anew, and a ticket has at most `MAX_CLAIMS` claims, so every ticket ends. A deadline that passed while no
  curriculum could have granted another claim (a run that was stopped overnight) counts from the start of this one.
- The end of a judged group's member is learnt of from EPISODES, as it has no score while others are out. It is not
  buried: an end that is stored wins.
- A ticket that nobody can play any more (its pool is gone, or the weights that it evaluates) gets the same end at once.
- A ticket that is absent from TASKS and then, in that order, from EPISODES is published again. In that order, because a
  player stores the end before it acknowledges the ticket.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, put_once
from agentjet.curriculum.board import MAX_CLAIMS, Board, GroupOut
from agentjet.errors import BusError, BusUnavailableError, ConflictError
from agentjet.schemas import subject
from agentjet.schemas.episode import DEADLINE, EndStatus, Episode, Fault
from agentjet.schemas.ids import RunId, TicketId
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

log = structlog.get_logger(__name__)

_CHUNK = 256
_WINDOW = 32


async def publish_tickets(bus: Bus, run: RunId, tickets: Sequence[Ticket]) -> None:
    """Put tickets on TASKS; those that are there already stay as they are."""
    window = asyncio.Semaphore(_WINDOW)

    async def publish(ticket: Ticket) -> None:
        async with window:
            try:
                await put(bus, run, Stream.TASKS, subject.task(run, ticket.pool, ticket.id), ticket, expected=0)
            except ConflictError:
                log.debug("a ticket is on TASKS already", ticket=ticket.id)

    async with asyncio.TaskGroup() as group:
        for ticket in tickets:
            group.create_task(publish(ticket))


async def patiently(work: Callable[[], Awaitable[None]]) -> None:
    """Work that the next sweep does again when the bus does not let it."""
    try:
        await work()
    except* BusUnavailableError:
        raise
    except* BusError as error:
        log.warning("the curriculum waits for the bus", error=str(error.exceptions[0]))


class Sweep:
    """Keeps every open ticket alive or buries it.

    Args:
        why_hopeless: Says why nobody can play a group's tickets any more; these are buried at once.
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        board: Board,
        clock: BusClock,
        why_hopeless: Callable[[GroupIssue], str | None],
    ) -> None:
        self._bus, self._run, self._board, self._clock = bus, run, board, clock
        self._why_hopeless = why_hopeless
        self._since = math.inf
        """JetStream time of the first look, soon after the curriculum's start."""
        self.num_buried = 0
        self.num_published_again = 0

    async def bury(self) -> None:
        """Write the end of each ticket that is past its deadline, or that nobody can play any more."""
        now = self._clock.now()
        self._since = min(self._since, now)
        for out, member, ticket in list(self._board.open_slots()):
            if ticket in self._board.ended:
                continue
            deadline, why_hopeless = self._deadline(out, ticket), self._why_hopeless(out.issue)
            if why_hopeless is not None:
                await self._end(out, member, ticket, why_hopeless)
            elif deadline is not None and now > deadline:
                claim = self._board.claims.get(ticket)
                is_spent = claim is not None and claim.is_last
                why = f"it was claimed {MAX_CLAIMS} times without an end" if is_spent else "its deadline passed"
                await self._end(out, member, ticket, why)

    def _deadline(self, out: GroupOut, ticket: TicketId) -> float | None:
        """JetStream time from which on the ticket is buried."""
        deadline, claim = self._board.deadline(out, ticket), self._board.claims.get(ticket)
        can_be_claimed = claim is not None and not claim.is_last and not out.issue.client_group
        if deadline is not None and deadline < self._since and can_be_claimed:
            return self._since + out.issue.deadline_seconds
        return deadline

    async def _end(self, out: GroupOut, member: int, ticket: TicketId, why: str) -> None:
        claim = self._board.claims.get(ticket)
        episode = Episode(
            run=self._run,
            ticket=self._board.ticket(out, member),
            attempt=0 if claim is None else claim.attempt,
            status=EndStatus.DEAD,
            fault=Fault(kind=DEADLINE, message=f"ticket {ticket}: {why}"),
            worker="curriculum",
        )
        stored = await put_once(self._bus, self._run, Stream.EPISODES, subject.episode(self._run, ticket), episode)
        self._board.end(ticket)
        if stored.is_ours:
            self.num_buried += 1
            log.warning("a ticket is dead", ticket=ticket, reason=why, attempt=episode.attempt)

    async def note_ends(self) -> None:
        """Learn which members of judged groups have ended: their scores come with the last one's."""
        board = self._board
        playing = {
            subject.episode(self._run, ticket): ticket
            for out, _, ticket in board.open_slots()
            if out.issue.is_judged and ticket in board.claims and ticket not in board.ended
        }
        for start in range(0, len(playing), _CHUNK):
            wanted = list(playing)[start : start + _CHUNK]
            for of in await self._bus.last_many(stream_name(self._run, Stream.EPISODES), wanted):
                board.end(playing[of])

    async def publish_missing(self) -> None:
        """Publish each current ticket again that neither waits on TASKS nor has ended; paused ones wait."""
        waiting = [
            (out, member, ticket)
            for out, member, ticket in self._board.open_slots()
            if ticket not in self._board.ended
            and ticket not in self._board.paused
            and not out.issue.client_group
            and self._why_hopeless(out.issue) is None
        ]
        for start in range(0, len(waiting), _CHUNK):
            await self._publish_missing(waiting[start : start + _CHUNK])

    async def _publish_missing(self, slots: Sequence[tuple[GroupOut, int, TicketId]]) -> None:
        on_tasks = {ticket: subject.task(self._run, out.issue.pool, ticket) for out, _, ticket in slots}
        there = await self._bus.last_many(stream_name(self._run, Stream.TASKS), list(on_tasks.values()))
        absent = [slot for slot in slots if on_tasks[slot[2]] not in there]
        if not absent:
            return
        ends = {ticket: subject.episode(self._run, ticket) for _, _, ticket in absent}
        ended = await self._bus.last_many(stream_name(self._run, Stream.EPISODES), list(ends.values()))
        for ticket in (ticket for ticket, end in ends.items() if end in ended):
            self._board.end(ticket)
        # The board may have moved on while the streams were read.
        lost = [
            (out, member)
            for out, member, ticket in absent
            if ends[ticket] not in ended and self._board.is_current(ticket)
        ]
        if lost:
            self.num_published_again += len(lost)
            log.info("tickets are published again", count=len(lost))
            await publish_tickets(self._bus, self._run, [self._board.ticket(out, member) for out, member in lost])
