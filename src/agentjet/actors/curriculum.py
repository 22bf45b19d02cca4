"""The curriculum actor: issues tickets, serves claims, buries the dead, purges."""

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
from agentjet.curriculum.curriculum import Curriculum


async def run(actor: Actor) -> None:
    """Until the run is finished."""
    curriculum = Curriculum(actor.bus, actor.run, actor.settings, actor.place.secret())
    actor.waiting, actor.problems, actor.metrics = curriculum.waiting, curriculum.problems, curriculum.metrics
    actor.state, actor.info["last_seen"] = "busy", curriculum.last_seen
    await curriculum.run()


if __name__ == "__main__":
    main("curriculum", run)
