"""Healing: what was lost between two writes is written again, and what can not end is buried.

- A ticket past its deadline gets the end "dead" (create-only: an end that is stored already wins). Each claim sets the
  deadline anew, and a ticket has at most `MAX_CLAIMS` claims, so every ticket ends.
- A ticket that is absent from TASKS and then, in that order, from EPISODES is published again. In that order, because a
  player stores the end before it acknowledges the ticket.
"""

import asyncio
from collections.abc import Sequence

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, put_once
from agentjet.curriculum.board import MAX_CLAIMS, Board, GroupOut
from agentjet.errors import ConflictError
from agentjet.schemas import subject
from agentjet.schemas.episode import EndStatus, Episode, Fault
from agentjet.schemas.ids import RunId, TicketId
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


class Sweep:
    """Keeps every open ticket alive or buries it.

    Args:
        pools: The configured pools; tickets of others are buried.
    """

    def __init__(self, bus: Bus, run: RunId, board: Board, clock: BusClock, pools: frozenset[str]) -> None:
        self._bus, self._run, self._board, self._clock, self._pools = bus, run, board, clock, pools
        self.num_buried = 0
        self.num_published_again = 0

    async def bury(self) -> None:
        """Write the end of each ticket that is past its deadline."""
        now = self._clock.now()
        for out, member, ticket in list(self._board.open_slots()):
            if ticket in self._board.ended:
                continue
            deadline = self._board.deadline(out, ticket)
            if out.issue.pool not in self._pools:
                await self._end(out, member, ticket, f"its pool {out.issue.pool} is no longer configured")
            elif deadline is not None and now > deadline:
                claim = self._board.claims.get(ticket)
                is_spent = claim is not None and claim.is_last
                why = f"it was claimed {MAX_CLAIMS} times without an end" if is_spent else "its deadline passed"
                await self._end(out, member, ticket, why)

    async def _end(self, out: GroupOut, member: int, ticket: TicketId, why: str) -> None:
        claim = self._board.claims.get(ticket)
        episode = Episode(
            run=self._run,
            ticket=self._board.ticket(out, member),
            attempt=0 if claim is None else claim.attempt,
            status=EndStatus.DEAD,
            fault=Fault(kind="deadline", message=f"ticket {ticket}: {why}"),
            worker="curriculum",
        )
        stored = await put_once(self._bus, self._run, Stream.EPISODES, subject.episode(self._run, ticket), episode)
        self._board.end(ticket)
        if stored.is_ours:
            self.num_buried += 1
            log.warning("a ticket is dead", ticket=ticket, reason=why, attempt=episode.attempt)

    async def publish_missing(self) -> None:
        """Publish each current ticket again that neither waits on TASKS nor has ended."""
        waiting = [
            (out, member, ticket)
            for out, member, ticket in self._board.open_slots()
            if ticket not in self._board.ended and not out.issue.client_group and out.issue.pool in self._pools
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
