"""What the streams tell the curriculum: everything that counts at its start, and from then on what is new.

LEDGER and SCORES are read in order; a record that is seen twice changes nothing. Of SCORES only those of groups that
are out matter, and the newest, which say how the pools fare.
"""

from collections.abc import Callable

import structlog

from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.curriculum.course import Course
from agentjet.curriculum.purge import first_since
from agentjet.errors import RecordError
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.ids import RunId
from agentjet.schemas.score import Score
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name

log = structlog.get_logger(__name__)

_CHUNK = 256
_RECENT_SCORES = 1024
_MARGIN_SECONDS = 60.0
"""Clocks of a cluster may differ by as much."""


class Feed:
    """Feeds a course from the streams.

    Args:
        bus: Holds the streams.
        run: The run.
        course: What is fed.
        clock: Told the time of every message.
        wake: Called when something may have become possible.
    """

    def __init__(self, bus: Bus, run: RunId, course: Course, clock: BusClock, wake: Callable[[], None]) -> None:
        self._bus, self._run, self._course, self._clock, self._wake = bus, run, course, clock, wake
        self._ledger_sequence = 0
        self._scores_sequence = 0

    async def take_ledger(self, message: StoredMessage) -> None:
        """A record of LEDGER, of any chain.

        Raises:
            FencedError: A newer curriculum has started.
            RecordError: A chain is damaged.
        """
        self._clock.observe(message.time)
        record = await read(self._bus, self._run, Stream.LEDGER, message)
        self._course.apply(message.sequence, message.time, record)
        self._ledger_sequence = max(self._ledger_sequence, message.sequence)
        self._wake()

    async def follow_ledger(self, own_sequence: Callable[[], int]) -> None:
        """Whatever else is appended, for ever; raises as `take_ledger`.

        Args:
            own_sequence: The newest record of the curriculum's own chain: those up to it are known.
        """
        start = self._ledger_sequence + 1
        own = subject.ledger(self._run, CURRICULUM)
        async for message in self._bus.tail(stream_name(self._run, Stream.LEDGER), start=start):
            if message.subject == own and message.sequence <= own_sequence():
                self._clock.observe(message.time)
            else:
                await self.take_ledger(message)

    async def recall_scores(self) -> None:
        """The scores of what the ledger says is out. Raises BusError."""
        info = await self._bus.stream_info(stream_name(self._run, Stream.SCORES))
        start, low_water = info.last_sequence - _RECENT_SCORES, self._course.board.low_water
        if low_water is not None:
            start = min(start, await first_since(self._bus, info, low_water - _MARGIN_SECONDS))
        async for message in self._bus.scan(info.name, start=max(start, 1)):
            await self._take_score(message)

    async def recall_claims(self) -> None:
        """The claims of what is out; others may be granted meanwhile. Raises BusError."""
        board = self._course.board
        tickets = {subject.claim(self._run, ticket): ticket for _, _, ticket in board.open_slots()}
        subjects = list(tickets)
        for start in range(0, len(subjects), _CHUNK):
            wanted = subjects[start : start + _CHUNK]
            for of, message in (await self._bus.last_many(stream_name(self._run, Stream.CLAIMS), wanted)).items():
                record = await read(self._bus, self._run, Stream.CLAIMS, message)
                known = board.claims.get(tickets[of])
                if isinstance(record, Claim) and (known is None or known.attempt < message.sequence):
                    deadline = message.time + record.ticket.deadline_seconds
                    board.claim(tickets[of], message.sequence, deadline, record.number)

    async def follow_scores(self) -> None:
        """Whatever else is scored, for ever."""
        start = self._scores_sequence + 1
        async for message in self._bus.tail(stream_name(self._run, Stream.SCORES), start=start):
            await self._take_score(message)

    async def _take_score(self, message: StoredMessage) -> None:
        self._clock.observe(message.time)
        self._scores_sequence = message.sequence
        try:
            record = await read(self._bus, self._run, Stream.SCORES, message)
        except RecordError as error:
            log.error("a score can not be read; its slot stays open", subject=message.subject, error=str(error))
            return
        if isinstance(record, Score) and self._course.scored(record, message.time):
            self._wake()
