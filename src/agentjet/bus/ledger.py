"""A chain of the ledger: each record a compare-and-set on its predecessor, so that two writers can not both go on.

The writer that loses learns it at its next append: `FencedError`, and it must stop.
"""

from agentjet.bus.protocol import Bus
from agentjet.bus.record import put, read
from agentjet.errors import ConflictError, FencedError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record
from agentjet.schemas.subject import Stream, stream_name


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

    async def append(self, record: Record) -> int:
        """Store the chain's next record; returns its LEDGER sequence.

        Raises:
            FencedError: Another writer has appended since `load`.
            BusError: The record may be stored or not; `load` again before the next append.
        """
        try:
            self._last = await put(self._bus, self._run, Stream.LEDGER, self._subject, record, expected=self._last)
        except ConflictError:
            who = "curriculum" if self._who == subject.CURRICULUM else f"learner of model {self._who}"
            raise FencedError(
                f"a newer {who} has taken over run {self._run}; this one stops. Keep one of them running"
            ) from None
        return self._last
