"""The gateway actor: the HTTP endpoint alone, for agents that hold keys but run no rollout."""

import asyncio

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.gateway import Gateway


async def run(actor: Actor) -> None:
    """Until stopped."""
    gateway = Gateway(actor.bus, actor.run, actor.settings.gateway)
    actor.info["base_url"] = await gateway.start()
    actor.state = "idle"
    try:
        await asyncio.Event().wait()
    finally:
        await gateway.close()


if __name__ == "__main__":
    main("gateway", run)
