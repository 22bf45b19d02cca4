"""Which engine a question goes to: the one that holds its conversation's cache while it has room, else any.

Invariant: an engine that is gone, full or silent costs a question a moment, never its answer: then any engine takes it.
With one engine that is known nobody is asked. It does not know questions or replies.
"""

from collections import defaultdict

from agentjet.bus import record
from agentjet.bus.protocol import Bus
from agentjet.errors import BusError, RecordError
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.room import RoomGrant, RoomRequest

ANSWER_SECONDS = 1.0
"""An engine that takes longer to say whether it has room is gone, or has none."""


class Placement:
    """What one gateway knows of the engines of a run."""

    def __init__(self, bus: Bus, run: RunId) -> None:
        self._bus, self._run = bus, run
        self._engines: dict[str, set[str]] = defaultdict(set)
        """By model; those that answered."""

    def saw(self, model: str, engine: str) -> None:
        """An engine answered."""
        if engine:
            self._engines[model].add(engine)

    async def place(self, model: str, holder: str) -> str:
        """Where a question is to be sent whose conversation `holder` answered last (empty: nobody did)."""
        if not holder or not self._engines[model] - {holder}:
            return subject.ANY_ENGINE
        grant = await self._ask(model, holder, RoomRequest())
        return holder if grant is not None and grant.has_room else subject.ANY_ENGINE

    async def is_there(self, model: str, engine: str) -> bool:
        """Whether an engine still answers."""
        return await self._ask(model, engine, RoomRequest(is_promise=False)) is not None

    async def _ask(self, model: str, engine: str, question: RoomRequest) -> RoomGrant | None:
        where = subject.engine_service(self._run, model, engine)
        try:
            return await record.ask(self._bus, where, question, RoomGrant, timeout_seconds=ANSWER_SECONDS)
        except (BusError, RecordError):
            self._engines[model].discard(engine)
            return None
