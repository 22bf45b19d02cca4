"""The rollout actor: plays the tickets of every pool that has a workflow, with a gateway of its own.

Told to stop, it begins nothing new and lets what runs come to its end for a while, so that little is played twice.
"""

import asyncio

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.gateway import Gateway
from agentjet.rollout import Rollout

DRAIN_SECONDS = 40.0
"""Below `process.STOP_SECONDS`."""


async def run(actor: Actor) -> None:
    """Until stopped."""
    gateway = Gateway(actor.bus, actor.run, actor.settings.gateway)
    actor.info["base_url"] = await gateway.start()
    try:
        rollout = Rollout(actor.bus, actor.run, actor.settings, gateway)
        actor.waiting, actor.metrics, actor.state = rollout.waiting, rollout.metrics, "busy"
        await _play(rollout)
    finally:
        await gateway.close()


async def _play(rollout: Rollout) -> None:
    playing = asyncio.create_task(rollout.run())
    try:
        await asyncio.shield(playing)
    except asyncio.CancelledError:
        await rollout.drain(DRAIN_SECONDS)
        raise
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


if __name__ == "__main__":
    main("rollout", run)
