"""A running swarm on the screen until its run is finished."""

import asyncio

from rich.console import Console

from agentjet.actors.swarm import Swarm
from agentjet.bus.protocol import Bus
from agentjet.errors import BusError, RecordError
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER, decode
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Presence
from agentjet.ui.history import RunHistory, follow
from agentjet.ui.progress import Progress

REFRESH_SECONDS = 1.0


async def live_actors(bus: Bus, run: RunId) -> list[Presence]:
    """Every actor whose heartbeat lives; none while the bus is away."""
    try:
        bodies = await bus.presence(subject.presence_bucket(run))
        records = [decode({SCHEMA_HEADER: Presence.schema_header()}, body) for body in bodies.values()]
    except (BusError, RecordError):
        return []
    return [record for record in records if isinstance(record, Presence)]


async def watch(swarm: Swarm, console: Console, *, title: str) -> RunHistory:
    """Show progress until the run is finished; returns what it saw."""
    history = RunHistory()
    with Progress(console, history, num_steps=swarm.settings.run.num_steps, title=title) as progress:
        following = asyncio.ensure_future(follow(swarm.bus, swarm.run, history))
        showing = asyncio.ensure_future(_show(swarm, progress))
        try:
            await swarm.finished()
        finally:
            following.cancel()
            showing.cancel()
            await asyncio.gather(following, showing, return_exceptions=True)
    return history


async def _show(swarm: Swarm, progress: Progress) -> None:
    while True:
        progress.refresh(await live_actors(swarm.bus, swarm.run))
        await asyncio.sleep(REFRESH_SECONDS)
