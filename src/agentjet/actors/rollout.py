"""The rollout actor: plays the tickets of every pool that has a workflow, with a gateway of its own."""

from agentjet.actors.process import Actor, main
from agentjet.gateway import Gateway
from agentjet.rollout import Rollout


async def run(actor: Actor) -> None:
    """Until stopped."""
    gateway = Gateway(actor.bus, actor.run, actor.settings.gateway)
    actor.info["base_url"] = await gateway.start()
    try:
        rollout = Rollout(actor.bus, actor.run, actor.settings, gateway)
        actor.waiting, actor.metrics, actor.state = rollout.waiting, rollout.metrics, "busy"
        await rollout.run()
    finally:
        await gateway.close()


if __name__ == "__main__":
    main("rollout", run)
