"""A running swarm on the screen until its run is finished."""

import asyncio
import contextlib

from rich.console import Console

from agentjet.actors.swarm import Swarm
from agentjet.bus.presence import live_actors
from agentjet.errors import BusError
from agentjet.ui.history import RunHistory, catch_up, follow
from agentjet.ui.progress import Progress

REFRESH_SECONDS = 1.0


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
        # Whoever follows is behind; the report is on the whole run.
        await catch_up(swarm.bus, swarm.run, history)
    return history


async def _show(swarm: Swarm, progress: Progress) -> None:
    while True:
        actors = []
        with contextlib.suppress(BusError):  # the server is away, and is started again
            actors = await live_actors(swarm.bus, swarm.run)
        progress.refresh(actors)
        await asyncio.sleep(REFRESH_SECONDS)
