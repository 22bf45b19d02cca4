"""A chain of the ledger: each record a compare-and-set on its predecessor, so that two writers can not both go on.

The writer that loses learns it at its next append: `FencedError`, and it must stop.
"""

import asyncio

import structlog

from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, read
from agentjet.errors import BusError, BusFullError, BusTimeoutError, ConflictError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.codec import encode
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0


class LedgerChain:
    """The one writer's hold on `ledger.<who>`; `who` is a model, or `subject.CURRICULUM`."""

    def __init__(self, bus: Bus, run: RunId, who: str) -> None:
        self._bus, self._run, self._who = bus, run, who
        self._subject = subject.ledger(run, who)
        self._last = 0

    @property
    def last_sequence(self) -> int:
        """LEDGER sequence of the chain's last record that this writer knows; 0 for none."""
        return self._last

    async def load(self) -> list[tuple[int, Record]]:
        """The chain so far, as (LEDGER sequence, record); the next append follows its last record."""
        records: list[tuple[int, Record]] = []
        async for message in self._bus.scan(stream_name(self._run, Stream.LEDGER), self._subject):
            records.append((message.sequence, await read(self._bus, self._run, Stream.LEDGER, message)))
            self._last = message.sequence
        return records

    async def find_end(self) -> None:
        """As `load`, for a writer that reads the records by itself, afterwards."""
        message = await self._bus.last(stream_name(self._run, Stream.LEDGER), self._subject)
        self._last = 0 if message is None else message.sequence

    async def append(self, record: Record) -> int:
        """Store the chain's next record; returns its LEDGER sequence.

        A server that is away or full is waited for: giving up would throw away what the writer has decided.

        Raises:
            FencedError: Another writer has appended since `load`.
        """
        is_unsure = False
        while True:
            try:
                self._last = await put(self._bus, self._run, Stream.LEDGER, self._subject, record, expected=self._last)
                return self._last
            except ConflictError:
                if not is_unsure:
                    raise self._fenced() from None
                # What stands there may be an earlier try of ours: looked at below, as often as it takes.
            except (BusTimeoutError, BusFullError) as error:
                is_unsure = True
                log.error("the ledger can not be written; trying again", chain=self._who, error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            if await self._is_stored(record):
                return self._last

    async def _is_stored(self, record: Record) -> bool:
        """Whether an append whose answer was lost is stored all the same; False also while nobody can tell.

        Raises FencedError when another record stands there.
        """
        try:
            message = await self._bus.last(stream_name(self._run, Stream.LEDGER), self._subject)
        except BusError:
            return False
        if message is None or message.sequence == self._last:
            return False
        if message.payload != encode(record)[1]:
            raise self._fenced()
        self._last = message.sequence
        return True

    def _fenced(self) -> FencedError:
        who = "curriculum" if self._who == subject.CURRICULUM else f"learner of model {self._who}"
        return FencedError(f"a newer {who} has taken over run {self._run}; this one stops. Keep one of them running")
