"""Curriculum, inference with a scripted engine, rollout and reward on one bus: all that plays and scores episodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from chat_models import RUN
from scripted_engine import ScriptedEngine
from small_swarm import SECRET, SmallSwarm

from agentjet.bus.protocol import Bus
from agentjet.bus.record import read_as
from agentjet.config.settings import SwarmSettings
from agentjet.curriculum.curriculum import Curriculum
from agentjet.gateway import Gateway
from agentjet.inference.service import InferenceService
from agentjet.reward import Reward
from agentjet.rollout import Rollout
from agentjet.schemas.score import Score
from agentjet.schemas.subject import Stream, stream_name


class LiveSwarm:
    """The actors of one run."""

    def __init__(self, bus: Bus, settings: SwarmSettings, reply: str | Callable[[str], str]) -> None:
        self.bus, self.settings = bus, settings
        self.small = SmallSwarm(bus, reply, models=tuple(settings.models), context_length=4096)
        self.run = RUN
        self.curriculum = Curriculum(bus, RUN, settings, SECRET, tick_seconds=0.05)
        self.tasks: list[asyncio.Future[None]] = []

    @property
    def engine(self) -> ScriptedEngine:
        return self.small.engine

    @contextlib.asynccontextmanager
    async def running(self, *, plays: bool) -> AsyncIterator["LiveSwarm"]:
        """All actors at work; the rollout only when it `plays`."""
        await self.small.prepare()
        gateway = Gateway(self.bus, RUN, self.settings.gateway)
        works = [
            self.curriculum.run(),
            *(self._service(model).run() for model in self.settings.models),
            Reward(self.bus, RUN, self.settings).run(),
        ]
        if plays:
            await gateway.start()
            works.append(Rollout(self.bus, RUN, self.settings, gateway).run())
        self.tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(0.2)
        try:
            yield self
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await gateway.close()

    def _service(self, model: str) -> InferenceService:
        return InferenceService(
            self.bus,
            RUN,
            model,
            self.engine,
            self.small.chat.tokenizer,
            secret=SECRET,
            served_models=self.small.models,
            stop_ids=frozenset({self.small.chat.end}),
        )

    async def scores(self, count: int, timeout_seconds: float = 30.0) -> list[Score]:
        """The first scores of the run."""
        reading = asyncio.ensure_future(self._read(count))
        await asyncio.wait({reading, *self.tasks}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self.tasks:
            if task.done():
                task.result()
        if not reading.done():
            reading.cancel()
            raise TimeoutError(f"fewer than {count} scores after {timeout_seconds:.0f} s")
        return reading.result()

    async def _read(self, count: int) -> list[Score]:
        found: list[Score] = []
        async for message in self.bus.tail(stream_name(RUN, Stream.SCORES)):
            found.append(await read_as(Score, self.bus, RUN, Stream.SCORES, message))
            if len(found) == count:
                break
        return found
