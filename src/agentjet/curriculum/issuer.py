"""The curriculum's own chain of the ledger, and the tickets that follow from it.

Invariants:

- A decision is a record of the chain first, then tickets on TASKS; the sweep heals what a crash leaves between the two.
- Decisions are taken one at a time, each on a course that knows all records before it.
- After an append whose fate is unknown nothing is decided until the chain has been read again.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.ledger import LedgerChain
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.curriculum.board import tickets_of
from agentjet.curriculum.course import Course
from agentjet.curriculum.sweep import Sweep, patiently, publish_tickets
from agentjet.errors import BusError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import CurriculumStart, GroupIssue, RunFinish
from agentjet.schemas.record import Record
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name

log = structlog.get_logger(__name__)

_START_TRIES = 20


class Issuer:
    """Appends what the course decides, and publishes what was appended.

    Args:
        bus: Holds the streams.
        run: The run.
        course: Takes in each record as soon as it is stored.
        clock: The bus's time.
        sweep: Publishes what an append of unknown fate may have issued.
    """

    def __init__(self, bus: Bus, run: RunId, course: Course, clock: BusClock, sweep: Sweep) -> None:
        self._bus, self._run, self._course, self._clock, self._sweep = bus, run, course, clock, sweep
        self._chain = LedgerChain(bus, run, CURRICULUM)
        self._lock = asyncio.Lock()
        self._is_stale = False

    @property
    def last_sequence(self) -> int:
        """LEDGER sequence of the newest record of the chain."""
        return self._chain.last_sequence

    async def take_over(self, take: Callable[[StoredMessage], Awaitable[None]], config_digest: str) -> None:
        """Read the ledger and append the start; what a predecessor has stored meanwhile is read first.

        Args:
            take: Takes in a record of the ledger.
            config_digest: Of the settings, for the record.

        Raises:
            FencedError: Another curriculum keeps writing.
        """
        for tries_left in reversed(range(_START_TRIES)):
            self._course.incarnation = 0
            await self._chain.find_end()
            async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER)):
                await take(message)
            self._course.incarnation = self._course.ledger.incarnation + 1
            start = CurriculumStart(
                run=self._run,
                incarnation=self._course.incarnation,
                writer=secrets.token_hex(8),
                config_digest=config_digest,
            )
            try:
                await self._append(start)
                return
            except FencedError:
                if not tries_left:
                    raise

    async def issue(self, decide: Callable[[], GroupIssue | None]) -> GroupIssue | None:
        """Decide, record and publish one group; the decision holds the lock, so no two see the same room.

        Raises:
            FencedError: A newer curriculum has taken over.
            BusError: The group may have been recorded or not.
        """
        async with self._lock:
            issue = decide()
            if issue is None:
                return None
            await self._append(issue)
        if not issue.client_group:
            tickets = tickets_of(self._run, issue, self._course.task_of(issue))
            await patiently(lambda: publish_tickets(self._bus, self._run, tickets))
        return issue

    async def finish(self) -> bool:
        """Record the run's end, if it has come; raises as `issue`."""
        async with self._lock:
            reason = self._course.finish_reason()
            if reason is None:
                return False
            await self._append(RunFinish(run=self._run, reason=reason))
        log.info("the run is over", reason=reason)
        return True

    async def refresh(self) -> None:
        """After a lost answer: read the chain again, and publish what it says. Raises BusError."""
        if not self._is_stale:
            return
        async with self._lock:
            await self._chain.find_end()
            chain = subject.ledger(self._run, CURRICULUM)
            async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER), chain):
                record = await read(self._bus, self._run, Stream.LEDGER, message)
                self._course.apply(message.sequence, message.time, record)
            self._is_stale = False
        await self._sweep.publish_missing()

    async def _append(self, record: Record) -> None:
        """Store a record of the chain and take it in."""
        if self._is_stale:
            raise BusError("the ledger has to be read again first")
        try:
            sequence = await self._chain.append(record)
        except BusError:
            # Stored or not: only the chain itself can tell.
            self._is_stale = True
            raise
        # The record's own time, up to a round trip: to read it would take another request.
        self._course.apply(sequence, self._clock.now(), record)
