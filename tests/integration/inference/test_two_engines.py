"""Two inference actors of one model, processes of their own on the real server, and one of them killed."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hand_played import SECRET
from small_swarm import SmallSwarm
from whole_swarm import make_streams, records, until

from agentjet.actors.supervisor import ActorProcess, ActorSpec
from agentjet.bus.nats import NatsBus
from agentjet.bus.presence import live_actors
from agentjet.bus.server import EmbeddedServer
from agentjet.config.settings import GatewaySettings
from agentjet.gateway import Gateway
from agentjet.schemas import subject
from agentjet.schemas.ids import RunId
from agentjet.schemas.presence import Presence
from agentjet.schemas.subject import Stream

CONFIG = """\
run = {{ dir = "{dir}", id = "{run}" }}
nats.url = "{url}"
streams.max_gib = 1
models.m = {{ path = "{model}", num_engines = 2, engine = {{ num_threads = 1, max_running = 16 }} }}
"""
NUM_EPISODES = 16
"""As many as one engine holds, and twice what it takes of a burst."""
LONG = 1000
"""Tokens that take a second to draw."""


@dataclass
class Pair:
    """Two engines at work and a gateway before them."""

    swarm: SmallSwarm
    bus: NatsBus
    run: RunId
    gateway: Gateway
    processes: list[ActorProcess]
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    async def ask(self, key: str, *, max_tokens: int = 4) -> None:
        """The next turn of a key's episode."""
        turns = self.turns[key]
        turns.append({"role": "user", "content": f"{list(self.turns).index(key)}: guess the number, turn {len(turns)}"})
        body = {"model": "m", "messages": turns, "max_tokens": max_tokens}
        turns.append((await self.gateway.complete(key, body))["choices"][0]["message"])

    async def engines(self) -> list[Presence]:
        """Those that serve."""
        return [one for one in await live_actors(self.bus, self.run, "inference") if one.state == "busy"]


@pytest.fixture
async def pair(
    nats_server: EmbeddedServer, nats_bus: NatsBus, run: RunId, tmp_path: Path, model_folder: Path, monkeypatch
) -> AsyncIterator[Pair]:
    monkeypatch.setattr("small_swarm.RUN", run)
    monkeypatch.setenv("AGENTJET_SECRET", SECRET.hex())
    config = tmp_path / "swarm.toml"
    config.write_text(CONFIG.format(dir=tmp_path, run=run, url=nats_server.url, model=model_folder))
    await make_streams(nats_bus, run)
    swarm, gateway = SmallSwarm(nats_bus), Gateway(nats_bus, run, GatewaySettings())
    processes = [
        ActorProcess(ActorSpec("inference", "m", number), ["--config", str(config)], {}, tmp_path / f"{number}.log")
        for number in (1, 2)
    ]
    here = Pair(swarm, nats_bus, run, gateway, processes)
    async with nats_bus.serve(subject.authorize_service(run), swarm.authorize, queue="curriculum"):
        lives = [asyncio.create_task(process.live()) for process in processes]

        async def both() -> bool:
            return len(await here.engines()) == 2

        try:
            await until(both, 90.0)
            yield here
        finally:
            await gateway.close()
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)


async def test_episodes_stay_where_their_cache_is_and_a_killed_engine_s_calls_move_within_seconds(pair: Pair):
    keys = [await pair.swarm.claim(group=f"g-{index}") for index in range(NUM_EPISODES)]
    for _ in range(3):
        await asyncio.gather(*(pair.ask(key) for key in keys))
    calls = await records(pair.bus, pair.run, Stream.CALLS)
    by_ticket = defaultdict(list)
    for call in calls:
        by_ticket[call.ticket].append(call)
    holders = {ticket: {call.engine for call in found} for ticket, found in by_ticket.items()}
    assert len(set().union(*holders.values())) == 2, "both engines work"
    assert all(len(engines) == 1 for engines in holders.values())
    turns = [turn for found in by_ticket.values() for turn in pairwise(found)]
    assert all(later.usage.cached_tokens >= first.usage.prompt_tokens for first, later in turns)

    victim = pair.processes[0]
    (dying,) = [one for one in await pair.engines() if one.pid == victim.pid]
    asked = [asyncio.create_task(pair.ask(key, max_tokens=LONG)) for key in keys]
    await asyncio.sleep(0.3)
    victim.kill()
    started = time.monotonic()
    await asyncio.gather(*asked)
    seconds = time.monotonic() - started
    last = (await records(pair.bus, pair.run, Stream.CALLS))[len(calls) :]
    assert len(last) == len({call.call for call in last}) == len(keys), "none is lost, none is stored twice"
    moved = [call for call in last if holders[call.ticket] == {dying.name} and call.engine != dying.name]
    assert moved
    assert seconds < 30
