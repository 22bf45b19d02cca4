"""The learner actor: one model's fold over the sample log, in optimizer steps."""

from agentjet.actors.process import Actor, main
from agentjet.training.incarnation import Incarnation


async def run(actor: Actor) -> None:
    """Until the run is finished or another learner takes over."""
    learner = Incarnation(actor.bus, actor.run, actor.model, actor.settings, name=actor.name)
    actor.waiting, actor.metrics, actor.state = learner.waiting, learner.metrics, "busy"
    await learner.run()


if __name__ == "__main__":
    main("learner", run, needs_model=True)
