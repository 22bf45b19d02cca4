"""Two engines of one model: an episode stays with the one that holds its cache while that is there and has room."""

import asyncio
import time
from collections import defaultdict
from contextlib import asynccontextmanager

from chat_models import RUN, user
from scripted_engine import ScriptedEngine
from small_swarm import SmallSwarm

from agentjet.bus.memory import MemoryBus
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway
from agentjet.schemas import subject
from agentjet.schemas.subject import Stream, stream_name


class Twins:
    """Engines `a` and `b` behind one gateway."""

    def __init__(self, bus: MemoryBus) -> None:
        self.swarm = SmallSwarm(bus)
        self.gateway = Gateway(bus, RUN, GatewaySettings())
        self.engines = {name: ScriptedEngine(self.swarm.chat) for name in "ab"}
        self.serving: dict[str, asyncio.Task[None]] = {}
        self.turns: dict[str, list[dict]] = defaultdict(list)

    async def start(self, name: str, num_places: int) -> None:
        service = self.swarm.new_service(engine=self.engines[name], engine_name=name, num_places=num_places)
        self.serving[name] = asyncio.create_task(service.run())
        await asyncio.sleep(0.01)

    async def kill(self, name: str) -> None:
        self.serving[name].cancel()
        await asyncio.gather(self.serving[name], return_exceptions=True)

    async def ask(self, key: str) -> str:
        """The next turn of a key's episode; returns the engine that answered."""
        turns = self.turns[key]
        turns.append(user(f"turn {len(turns)}"))
        answer = await self.gateway.complete(key, {"model": "m", "messages": turns})
        turns.append(answer["choices"][0]["message"])
        return self.gateway.session(key).holders["m", ""]

    def hold(self) -> None:
        for engine in self.engines.values():
            engine.go.clear()

    def free(self) -> None:
        for engine in self.engines.values():
            engine.go.set()

    async def meet(self, count: int) -> dict[str, list[str]]:
        """First turns of so many episodes that both engines are full; the keys by engine."""
        keys = [await self.swarm.claim(group=f"g-{index}") for index in range(count)]
        self.hold()
        asked = [asyncio.create_task(self.ask(key)) for key in keys]
        await asyncio.sleep(0.05)
        self.free()
        await asyncio.gather(*asked)
        tickets = {call.ticket: call.engine for call in await self.swarm.calls()}
        by_engine = defaultdict(list)
        for index, key in enumerate(keys):
            by_engine[tickets[f"g-{index}.0.0"]].append(key)
        return by_engine


@asynccontextmanager
async def twins(bus: MemoryBus, num_places: int):
    here = Twins(bus)
    await here.swarm.prepare()
    async with bus.serve(subject.authorize_service(RUN), here.swarm.authorize, queue="curriculum"):
        for name in here.engines:
            await here.start(name, num_places)
        try:
            yield here
        finally:
            await here.gateway.close()
            for name in here.engines:
                await here.kill(name)


async def test_every_episode_stays_with_the_engine_that_answered_it_first(memory_bus):
    async with twins(memory_bus, 4) as here:
        keys = await here.meet(8)
        assert [len(found) for found in keys.values()] == [4, 4]
        for _ in range(2):
            await asyncio.gather(*(here.ask(key) for found in keys.values() for key in found))
        engines = defaultdict(set)
        for call in await here.swarm.calls():
            engines[call.ticket].add(call.engine)
        assert all(len(found) == 1 for found in engines.values())
        assert len(await here.swarm.calls()) == 24


async def test_an_episode_whose_engine_is_full_is_answered_by_the_other(memory_bus):
    async with twins(memory_bus, 1) as here:
        keys = await here.meet(2)
        here.engines["a"].go.clear()
        blocked = asyncio.create_task(here.ask(keys["a"][0]))
        await asyncio.sleep(0.05)
        other = await here.swarm.claim(group="g-9")
        assert await here.ask(other) == "b"
        here.gateway.session(other).holders["m", ""] = "a"
        assert await here.ask(other) == "b"
        here.free()
        assert await blocked == "a"


async def test_an_episode_whose_engine_is_gone_is_answered_by_the_other_at_once(memory_bus):
    async with twins(memory_bus, 2) as here:
        keys = await here.meet(4)
        await here.kill("a")
        started = time.monotonic()
        assert await here.ask(keys["a"][0]) == "b"
        assert time.monotonic() - started < 1.0


async def test_what_lies_in_the_queue_of_a_dead_engine_is_asked_again_and_stored_once(memory_bus):
    async with twins(memory_bus, 2) as here:
        keys = await here.meet(4)
        here.gateway._exchange._look_seconds = 0.1
        here.engines["a"].go.clear()
        asked = [asyncio.create_task(here.ask(key)) for key in keys["a"]]
        await asyncio.sleep(0.05)
        assert await waiting(memory_bus, "a") == 2
        await here.kill("a")
        assert await asyncio.wait_for(asyncio.gather(*asked), 5) == ["b", "b"]
        calls = [call.call for call in await here.swarm.calls()]
        assert len(calls) == len(set(calls)) == 6


async def test_a_full_engine_leaves_the_shared_queue_to_the_other(memory_bus):
    async with twins(memory_bus, 1) as here:
        await here.kill("b")
        here.engines["a"].go.clear()
        keys = [await here.swarm.claim(group=f"g-{index}") for index in range(3)]
        asked = [asyncio.create_task(here.ask(key)) for key in keys]
        await asyncio.sleep(0.05)
        assert len(here.engines["a"].generations) == 1
        shared = memory_bus._stream(stream_name(RUN, Stream.INFER)).consumers["infer-m-any"]
        assert shared.num_pending() == 2, "it does not even look at what it can not take"
        await here.start("b", 1)
        async with asyncio.timeout(5):
            while sum(task.done() for task in asked) < 2:
                await asyncio.sleep(0.01)
        here.free()
        assert sorted(await asyncio.gather(*asked)) == ["a", "b", "b"]


async def waiting(bus: MemoryBus, engine: str) -> int:
    info = await bus.stream_info(stream_name(RUN, Stream.INFER), with_consumers=True)
    return info.consumers[f"infer-m-{engine}"]
