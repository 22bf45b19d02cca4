"""What an actor says of itself while it lives, and that it takes it back."""

from agentjet.actors.process import Actor
from agentjet.bus.memory import MemoryBus
from agentjet.bus.presence import live_actors, renew
from agentjet.config import SwarmSettings
from agentjet.schemas.ids import RunId

RUN = RunId("r-abcdef")


async def test_actor_that_leaves_is_not_alive_any_more(memory_bus: MemoryBus):
    actor = Actor("merger", "a", SwarmSettings(), RUN, memory_bus)
    await renew(memory_bus, actor.presence())
    assert [one.name for one in await live_actors(memory_bus, RUN)] == ["a"]
    await actor.leave()
    assert await live_actors(memory_bus, RUN) == []


async def test_actor_that_never_said_anything_leaves_without_an_error(memory_bus: MemoryBus):
    await Actor("merger", "a", SwarmSettings(), RUN, memory_bus).leave()
