"""What every actor process does, on the real server: how it stops, and what it does with a record it can not read."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from whole_swarm import make_streams, until

from agentjet.actors.actor import Actor
from agentjet.actors.process import _until_stopped
from agentjet.actors.supervisor import ActorProcess, ActorSpec
from agentjet.bus.nats import NatsBus
from agentjet.bus.presence import live_actors
from agentjet.bus.server import EmbeddedServer
from agentjet.config import SwarmSettings
from agentjet.errors import STOPPED_EXIT_CODE
from agentjet.schemas import subject
from agentjet.schemas.codec import SCHEMA_HEADER, encode
from agentjet.schemas.ids import RunId, new_run_id
from agentjet.schemas.ledger import LearnerStart
from agentjet.schemas.presence import Presence, Waiting
from agentjet.schemas.subject import Stream, stream_name
from agentjet.ui.status import assess, fetch

CONFIG = """\
run = {{ dir = "{dir}", id = "{run}" }}
nats.url = "{url}"
streams.max_gib = 1
models.small.path = "nowhere"
pools.guess = {{ tasks = "{tasks}", group_size = 2 }}
"""


async def test_heartbeats_go_on_while_an_actor_stops(nats_bus: NatsBus, monkeypatch):
    monkeypatch.setattr("agentjet.actors.actor.HEARTBEAT_SECONDS", 0.05)
    actor, may_end = Actor("merger", "slow", SwarmSettings(), new_run_id("test"), nats_bus), asyncio.Event()

    async def finish_first(actor: Actor) -> None:
        actor.state, actor.metrics = "busy", lambda: {"num_beats": next(numbers)}
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    async def heartbeat() -> Presence | None:
        return next(iter(await live_actors(nats_bus, actor.run)), None)

    async def is_stopping() -> Presence | None:
        found = await heartbeat()
        return found if found and found.state == "stopping" else None

    numbers = iter(range(10_000))
    running = asyncio.ensure_future(_until_stopped(actor, finish_first, nats_bus))
    await until(heartbeat)
    os.kill(os.getpid(), signal.SIGTERM)
    first = await until(is_stopping)
    later = first
    while later.metrics["num_beats"] < first.metrics["num_beats"] + 3:
        later = await until(is_stopping)
    may_end.set()
    assert await running == STOPPED_EXIT_CODE


async def test_an_actor_that_reaches_its_own_end_exits_with_zero(nats_bus: NatsBus):
    async def end(actor: Actor) -> None:
        await asyncio.sleep(0)

    assert (
        await _until_stopped(Actor("curriculum", "c", SwarmSettings(), new_run_id("test"), nats_bus), end, nats_bus)
        == 0
    )


async def test_an_actor_whose_heartbeat_breaks_ends_with_the_error_and_not_unseen(nats_bus: NatsBus):
    async def wait(actor: Actor) -> None:
        actor.waiting = broken
        await asyncio.Event().wait()

    def broken() -> list[Waiting]:
        raise ZeroDivisionError("no such wait")

    actor = Actor("merger", "m", SwarmSettings(), new_run_id("test"), nats_bus)
    with pytest.raises(ZeroDivisionError, match="no such wait"):
        async with asyncio.timeout(20):
            await _until_stopped(actor, wait, nats_bus)


@contextlib.asynccontextmanager
async def living(process: ActorProcess) -> AsyncIterator["asyncio.Task[None]"]:
    life = asyncio.create_task(process.live())
    try:
        yield life
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def store_of_newer_version(bus: NatsBus, run: RunId) -> int:
    start = LearnerStart(run=run, model="small", incarnation=1, base_step=0, cursor=1, config_digest="", fold_digest="")
    headers, body = encode(start)
    name, to = stream_name(run, Stream.LEDGER), subject.ledger(run, "small")
    return await bus.publish(to, body, stream=name, headers=headers | {SCHEMA_HEADER: "learner_start/9.0"}, expected=0)


async def test_p12_p15_actors_that_meet_a_newer_ledger_wait_and_say_so_and_are_not_started_again(
    nats_server: EmbeddedServer, nats_bus: NatsBus, run: RunId, tasks: str, tmp_path: Path
):
    config = tmp_path / "swarm.toml"
    config.write_text(CONFIG.format(dir=tmp_path, run=run, url=nats_server.url, tasks=tasks))
    await make_streams(nats_bus, run)
    sequence = await store_of_newer_version(nats_bus, run)
    specs = (ActorSpec("curriculum"), ActorSpec("learner", "small"))
    actors = [ActorProcess(one, ["--config", str(config)], {}, tmp_path / f"{one.name}.log") for one in specs]

    async def waiting() -> list[Presence]:
        found = await live_actors(nats_bus, run)
        return found if len(found) == 2 and all(one.state == "waiting" for one in found) else []

    async with living(actors[0]) as curriculum, living(actors[1]) as learner:
        presences = await until(waiting, 60.0)
        status = assess(await fetch(nats_bus, run))
        assert not curriculum.done() and not learner.done()
    unknown = f"LEDGER sequence {sequence}: schema 'learner_start/9.0' is not known here"
    assert [wait.what.partition(": ")[0] for one in presences for wait in one.waiting] == [
        "an upgrade of this curriculum",
        "an upgrade of this learner",
    ]
    assert all(unknown in wait.what for one in presences for wait in one.waiting)
    assert [problem.partition(" on ")[0] for problem in status.problems if unknown in problem][1:] == [
        "the curriculum",
        "the learner of model small",
    ]
    assert [one.num_starts for one in actors] == [1, 1]
    assert not any("Traceback" in one.log_path.read_text() for one in actors)
    assert await live_actors(nats_bus, run) == []
    assert (await nats_bus.stream_info(stream_name(run, Stream.LEDGER))).last_sequence == sequence
