"""A running actor: what it was given, and what it says of itself in its heartbeat."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentjet.bus.presence import renew, withdraw
from agentjet.bus.protocol import Bus
from agentjet.config import SwarmSettings
from agentjet.config.place import RunPlace
from agentjet.errors import BusError
from agentjet.observe.lag import LoopWatch
from agentjet.schemas import subject
from agentjet.schemas.codec import encode
from agentjet.schemas.event import Event
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.subject import Stream, stream_name

HEARTBEAT_SECONDS = 1.0
LEAVE_SECONDS = 1.0


@dataclass
class Actor:
    """A running actor: what it was given, and what it says of itself."""

    kind: str
    name: str
    settings: SwarmSettings
    run: RunId
    bus: Bus
    model: str = ""
    state: str = "starting"
    models: tuple[str, ...] = ()
    waiting: Callable[[], Sequence[Waiting]] = field(default=tuple)
    problems: Callable[[], Sequence[str]] = field(default=tuple)
    metrics: Callable[[], dict[str, float]] = field(default=dict)
    info: dict[str, object] = field(default_factory=dict)
    lag: LoopWatch | None = None
    started: float = field(default_factory=time.time)

    @property
    def place(self) -> RunPlace:
        """Where the run's files are."""
        return RunPlace(self.settings.run.dir)

    def presence(self) -> Presence:
        """The heartbeat as of now."""
        metrics = {key: float(value) for key, value in self.metrics().items()}
        if self.lag is not None:
            metrics["loop_lag_seconds"] = self.lag.max_lag_seconds
        return Presence(
            run=self.run,
            actor=self.kind,
            name=self.name,
            models=self.models,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self.started,
            state=self.state,
            waiting=tuple(self.waiting()),
            problems=tuple(self.problems()),
            metrics=metrics,
            info=dict(self.info),
        )

    async def beat(self) -> None:
        """Renew the heartbeat for ever; a bus that is away only delays it."""
        while True:
            with contextlib.suppress(BusError):
                await renew(self.bus, self.presence())
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def leave(self) -> None:
        """Take the heartbeat back, so that nobody takes this process for alive; a bus that is away does it by time."""
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await withdraw(self.bus, self.run, self.kind, self.name)

    async def tell(self, kind: str, level: str = "info", **data: object) -> None:
        """An event for people and dashboards; lost without harm when the bus is away."""
        headers, body = encode(Event(run=self.run, actor=self.kind, kind=kind, level=level, data=dict(data)))
        with contextlib.suppress(BusError):
            await self.bus.publish(
                subject.event(self.run, self.kind, kind),
                body,
                stream=stream_name(self.run, Stream.EVENTS),
                headers=headers,
            )
