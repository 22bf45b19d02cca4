"""The learner actor: one model's fold over the sample log, in optimizer steps."""

import gc

if __name__ == "__main__":
    # What is imported stays: to look for garbage in it takes a sixth of the start. `main` turns it on again.
    gc.disable()

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.training.incarnation import Incarnation


async def run(actor: Actor) -> None:
    """Until the run is finished or another learner takes over."""
    learner = Incarnation(actor.bus, actor.run, actor.model, actor.settings, name=actor.name)
    actor.waiting, actor.metrics, actor.problems = learner.waiting, learner.metrics, learner.problems
    actor.state = "busy"
    await learner.run()


if __name__ == "__main__":
    main("learner", run, needs_model=True)
