"""What an actor process says of itself while it lives, and that it takes it back."""

import gc

import pytest

from agentjet.actors.actor import Actor
from agentjet.actors.process import main
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


def test_an_actor_collects_garbage_again_once_it_is_imported(capsys: pytest.CaptureFixture[str]):
    gc.disable()
    try:
        with pytest.raises(SystemExit):
            main("learner", _nothing, needs_model=True, argv=["--help"])
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
    assert "--model" in capsys.readouterr().out


async def _nothing(actor: Actor) -> None: ...
