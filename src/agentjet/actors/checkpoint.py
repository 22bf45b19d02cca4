"""The checkpoint actor: verifies and names what learners wrote, keeps the newest."""

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.checkpoint import CheckpointKeeper


async def run(actor: Actor) -> None:
    """Until stopped."""
    keeper = CheckpointKeeper(actor.bus, actor.run, actor.settings)
    actor.waiting, actor.metrics, actor.state = keeper.waiting, keeper.metrics, "busy"
    await keeper.run()


if __name__ == "__main__":
    main("checkpoint", run)
