"""Who was there, and until when: heartbeats vanish with their actor, so somebody has to remember them."""

import time

from agentjet.bus.presence import live_actors
from agentjet.bus.protocol import Bus
from agentjet.schemas.ids import RunId

LOOK_SECONDS = 1.0
_KINDS = ("inference", "learner")


class Attendance:
    """When an engine and a learner of each model were last alive.

    It remembers since the curriculum's start, by this machine's clock, and only for people: nothing depends on it.
    """

    def __init__(self, bus: Bus, run: RunId) -> None:
        self._bus, self._run = bus, run
        self.last_seen: dict[str, float] = {}
        """By `<kind> <model>`: seconds since the epoch."""

    async def look(self) -> None:
        """Note who is alive now. Raises BusError."""
        for kind in _KINDS:
            for presence in await live_actors(self._bus, self._run, kind):
                for model in presence.models:
                    self.last_seen[f"{kind} {model}"] = time.time()
