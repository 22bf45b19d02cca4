"""The reward actor: turns ended episodes into scores."""

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.reward import Reward


async def run(actor: Actor) -> None:
    """Until stopped."""
    reward = Reward(actor.bus, actor.run, actor.settings)
    actor.waiting, actor.metrics, actor.state = reward.waiting, reward.metrics, "busy"
    await reward.run()


if __name__ == "__main__":
    main("reward", run)
